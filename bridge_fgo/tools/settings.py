"""A command's options, declared once: as the fields of the dataclass that it gets."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, get_type_hints

import typer

from bridge_fgo.config import OffloadConfig
from bridge_fgo.recipes.overrides import refuse_without_value
from bridge_fgo.tools.options import mistake, takes_offload_options

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object only.")]


def option(help: str, *flags: str, **how: Any) -> Any:
    """Return what annotates a field that is an option; `flags` only if they are not the field's name."""
    return typer.Option(*flags, help=help, **how)


def takes_settings(cls: type[Any], run: Callable[[Any], int], name: str) -> Callable[..., None]:
    """Return a typer command with an option for each field of a dataclass, which exits with what `run` returns.

    A mistake that `run` or the dataclass tells by a ValueError or an OSError is one line, and status 2. So is a
    RuntimeError if a job is examined: PyTorch raises it for a GPU that cannot be used. The error's notes follow: of
    a process that failed, lines of its log. The help is the docstring of `run`.

    The fields of `cls` are annotated by `option`; one of several strings is a Literal. A field `offload` gets the
    arguments of OffloadConfig, from options of their own.
    """
    mistakes = (ValueError, OSError, RuntimeError) if issubclass(cls, JobSettings) else (ValueError, OSError)

    def command(**given: Any) -> None:
        try:
            status = run(cls(**given))
        except mistakes as error:
            told = "\n".join([str(error), *getattr(error, "__notes__", ())])
            raise mistake(f"bridge-fgo {name}", told) from None
        raise typer.Exit(status)

    hints = get_type_hints(cls, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(cls)
    ]
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__doc__ = run.__doc__
    return takes_offload_options(command) if "offload" in hints else command


@dataclass(frozen=True)
class JobSettings:
    """Which job `plan` and `doctor` are about; `offload` holds arguments of OffloadConfig.

    ValueError for a setting that is wrong by itself, before torch is imported.
    """

    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE|CONFIG]",
            help="A recipe of this project's or Bridge's, module:function, path.py:function, or run_config.yaml.",
        ),
    ] = None
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION.FIELD=VALUE]...",
            help="Overrides of Bridge's config; hf_config=DIR has the recipe read DIR/config.json.",
        ),
    ] = None
    gpus: Annotated[int | None, option("GPUs of the job; the fewest it can have by default.", min=1)] = None
    gpus_per_node: Annotated[int | None, option("GPUs of a node; the system's own by default.", min=1)] = None
    vocab_size: Annotated[int | None, option("Where neither model nor tokenizer says.", min=1)] = None
    json_output: Json = False
    offload: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        OffloadConfig(**self.offload)
        refuse_without_value(self.overrides or ())


@dataclass(frozen=True)
class DoctorSettings(JobSettings):
    """What else `doctor` is to do."""

    probe: Annotated[bool, option("Measure the links of the GPUs here.")] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        of_job = {name: getattr(self, name) for name in ("gpus", "gpus_per_node", "vocab_size")}
        given = {name: value for name, value in of_job.items() if value is not None} | self.offload
        if self.target is None and given:
            told = ", ".join(f"{name}={value}" for name, value in given.items())
            raise ValueError(f"{told}: of a job, and none is named; give its recipe or saved config too")
