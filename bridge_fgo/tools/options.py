"""The options of every command line, made from the fields of `OffloadConfig`, and how one ends after a mistake.

typer and NeMo-Run return what the user gave as keyword arguments of `OffloadConfig`. A setting that the user did not
give is left out and keeps its default. `--slab-bytes`, `slab_bytes=` and `optimizer.offload.slab_bytes=` set the same
field.
"""

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, make_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin, get_type_hints

import typer

from bridge_fgo.config import OffloadConfig


@dataclass(frozen=True)
class Option:
    """One option, named like the field of `OffloadConfig` that it sets (`setting`), with one sentence of help.

    Its value is a bool, int, float or str (`kind`): one of `choices`, where there are any, or one of `words` or a
    number, or true or false.
    """

    setting: str
    kind: type
    choices: tuple[str, ...]
    words: tuple[str, ...]
    help: str

    def read(self, text: str | float) -> str | float:
        """Return one of `words`, or the number or truth in `text`; raise ValueError if it is neither."""
        if isinstance(text, str) and text in self.words:
            return text
        if self.kind is not bool:
            try:
                return self.kind(text)
            except ValueError:
                raise ValueError(f"{text!r}: use {' or '.join(('a number', *self.words))}") from None
        if str(text).lower() not in ("true", "false"):
            raise ValueError(f"{text!r} is none of {', '.join((*self.words, 'true', 'false'))}")
        return str(text).lower() == "true"

    @property
    def is_switch(self) -> bool:
        """Whether the option takes no value: it has a form that sets True and one that sets False."""
        return self.kind is bool and not self.words

    @property
    def flag(self) -> str:
        """The option as a command line spells it."""
        return f"--{self.setting.replace('_', '-')}"

    @property
    def off(self) -> str:
        """The option that sets False."""
        return f"--no-{self.flag[2:]}"


def _first_sentences() -> dict[str, str]:
    """Return the first sentence of each field's docstring; an empty dict if the source is not available."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(OffloadConfig))).body
    except OSError:
        return {}
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for statement, text in itertools.pairwise(tree.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(statement.target, ast.Name)
            sentence = " ".join(str(ast.literal_eval(text.value)).split()).partition(". ")[0]
            found[statement.target.id] = sentence.rstrip(".").replace("`", "") + "."
    return found


def _make_options() -> list[Option]:
    types, sentences, found = get_type_hints(OffloadConfig), _first_sentences(), []
    for field in fields(OffloadConfig):
        annotation = types[field.name]
        choices = get_args(annotation) if get_origin(annotation) is Literal else ()
        kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not NoneType]
        kind = str if choices else kinds[0]
        words = () if choices else tuple(word for each in kinds for word in get_args(each))
        found.append(Option(field.name, kind, choices, words, sentences.get(field.name, "")))
    return found


OPTIONS = _make_options()


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return OffloadConfig's keyword arguments. `given` maps `Option.setting` to a value; None: not given.

    Raises:
        ValueError: a value is neither a number nor a word of its option; names the setting.
    """
    found = {}
    for option in OPTIONS:
        if (value := given.get(option.setting)) is not None:
            try:
                found[option.setting] = option.read(value) if option.words else value
            except ValueError as error:
                raise ValueError(f"{option.setting}={error}") from None
    return found


def command_line(given: Mapping[str, Any]) -> list[str]:
    """Return the arguments that pass `given` (see `settings`) to a command of `takes_offload_options`."""
    words: list[str] = []
    for option in OPTIONS:
        value = given.get(option.setting)
        if value is None:
            continue
        if option.is_switch:
            words.append(option.flag if value else option.off)
        else:
            words += [option.flag, str(value)]
    return words


def takes_offload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a typer command, which gets the result of `settings` as its argument `offload`."""

    @functools.wraps(command)
    def with_options(*args: Any, **kwargs: Any) -> Any:
        given = {option.setting: kwargs.pop(option.setting) for option in OPTIONS}
        return command(*args, offload=settings(given), **kwargs)

    own = inspect.signature(command, eval_str=True)
    parameters = [parameter for parameter in own.parameters.values() if parameter.name != "offload"]
    for option in OPTIONS:
        kind: Any = Literal[option.choices] if option.choices else option.kind
        kind = kind if option.is_switch or kind is not bool else str  # which would take no value
        parser = option.read if option.words else None
        flags = f"{option.flag}/{option.off}" if option.is_switch else option.flag
        named = ("true", "false") if option.kind is bool else (option.kind.__name__,)
        metavar = f"<{'|'.join((*option.words, *named))}>" if option.words else None
        annotation = Annotated[kind | None, typer.Option(flags, help=option.help, parser=parser, metavar=metavar)]
        parameters.append(
            inspect.Parameter(option.setting, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    with_options.__signature__ = own.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return with_options


def _given_type(option: Option) -> Any:
    """Return the type of a field; as `Optional`, because NeMo-Run reads the types and knows no `X | None`."""
    kinds = (option.kind, str) if option.words else (option.kind,)
    return Optional[Union[kinds]]  # noqa: UP007, UP045


OffloadOptions = make_dataclass(
    "OffloadOptions", [(option.setting, _given_type(option), None) for option in OPTIONS], kw_only=True, module=__name__
)
"""Base of a dataclass with a command line's settings: one field for each option, None if it was not given."""


def mistake(command: str, error: object) -> SystemExit:
    """Print a user's mistake in one line; return what ends the process, with status 2 for any command."""
    typer.echo(f"{command}: {error}", err=True)
    return SystemExit(2)
