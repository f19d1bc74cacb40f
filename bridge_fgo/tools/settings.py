"""A command's options, declared once: as the fields of the dataclass that it gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from enum import Enum, StrEnum
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer


def option(help: str, *flags: str, **how: Any) -> Any:
    """Return what annotates a field that is an option; `flags` only where they are not the field's name."""
    return typer.Option(*flags, help=help, **how)


def takes_settings(cls: type[Any], run: Callable[[Any], int], name: str) -> Callable[..., None]:
    """Return a typer command with an option for each field of a dataclass, which exits with what `run` returns.

    A mistake that `run` or the dataclass tells by a ValueError or an OSError is one line, and status 2.

    Args:
        cls: its fields are annotated by `option`; one of several strings is a Literal.
        run: what the command does; it gets the dataclass, and its docstring is the command's help.
        name: of the command.
    """

    def command(**given: Any) -> None:
        given = {key: value.value if isinstance(value, Enum) else value for key, value in given.items()}
        try:
            status = run(cls(**given))
        except (ValueError, OSError) as error:
            typer.echo(f"bridge-fgo {name}: {error}", err=True)
            raise typer.Exit(2) from None
        raise typer.Exit(status)

    hints = get_type_hints(cls, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=_with_enum(field.name, hints[field.name]),
        )
        for field in fields(cls)
    ]
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__doc__ = run.__doc__
    return command


def _with_enum(name: str, hint: Any) -> Any:
    """Return a type with an enum in the place of a Literal, which typer takes only since 0.19."""
    kind, *extras = get_args(hint)
    for part in (kind, *get_args(kind)):
        if get_origin(part) is Literal:
            return Annotated[StrEnum(name, list(get_args(part))) | None, *extras]
    return hint
