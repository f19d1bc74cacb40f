"""The command lines' options for the offload, made from the fields of `OffloadConfig`: typer's, argparse's, NeMo-Run's.

Whatever a command line is made of, what it was given comes out as keyword arguments of `OffloadConfig`; a setting that
was not given is not among them and keeps its default.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, make_dataclass
from enum import StrEnum
from types import NoneType
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin, get_type_hints

import typer

from bridge_fgo.config import MIB, OffloadConfig, Spelling

WHEN = {"auto": None, "always": True, "never": False}
"""How argparse spells a setting that is True, False or None."""


@dataclass(frozen=True)
class Option:
    """One option.

    setting: the field of `OffloadConfig` that it sets.
    kind: type of its value: bool, int, float or str.
    choices: the strings that it takes; none for any.
    words: the strings that it takes beside numbers.
    is_automatic: whether it is True or False, and the default None leaves the choice to the run.
    help: one sentence.
    """

    setting: str
    spelling: Spelling
    kind: type
    choices: tuple[str, ...]
    words: tuple[str, ...]
    is_automatic: bool
    help: str

    @property
    def parameter(self) -> str:
        """The name of the option as a Python identifier."""
        return self.spelling.name.replace("-", "_")

    def read(self, text: str | float) -> str | float:
        """Return a word, or the number that a text says; raise ValueError where it is neither."""
        return text if isinstance(text, str) and text in self.words else self.kind(text)

    @property
    def flags(self) -> str:
        """The option as typer takes it."""
        return f"--{self.spelling.name}" + (f"/--{self.spelling.off}" if self.spelling.off else "")


def _first_sentences() -> dict[str, str]:
    """Return the first sentence of the docstring of each field; none where the source is not at hand."""
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
        spelling = field.metadata.get("spelling")
        if spelling is None:
            continue
        annotation = types[field.name]
        choices = get_args(annotation) if get_origin(annotation) is Literal else ()
        kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not NoneType]
        kind = str if choices else kinds[0]
        words = () if choices else tuple(word for each in kinds for word in get_args(each))
        text = sentences.get(field.name, "")
        if spelling.unit == MIB:
            text = text.replace("in bytes", "in MiB")
        found.append(Option(field.name, spelling, kind, choices, words, kind is bool and field.default is None, text))
    return found


OPTIONS = _make_options()


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return OffloadConfig's keyword arguments. `given` has values by `Option.parameter`; None is one not given."""
    found: dict[str, Any] = {}
    for option in OPTIONS:
        value = given.get(option.parameter)
        if value is None:
            continue
        if option.choices:
            value = str(value)  # and not typer's enum
        elif option.words:
            value = option.read(value)
        found[option.setting] = value * option.spelling.unit if option.kind is int else value
    return found


def command_line(given: Mapping[str, Any]) -> list[str]:
    """Return the words that give a command of `takes_offload_options` the same options; for `given` see `settings`."""
    words: list[str] = []
    for option in OPTIONS:
        value = given.get(option.parameter)
        if value is None:
            continue
        if option.kind is bool:
            words.append(f"--{option.spelling.name if value else option.spelling.off}")
        else:
            words += [f"--{option.spelling.name}", str(value)]
    return words


def takes_offload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a typer command the options. What was given is passed as its argument `offload`: see `settings`."""

    @functools.wraps(command)
    def with_options(*args: Any, **kwargs: Any) -> Any:
        given = {option.parameter: kwargs.pop(option.parameter) for option in OPTIONS}
        return command(*args, offload=settings(given), **kwargs)

    own = inspect.signature(command, eval_str=True)
    parameters = [parameter for parameter in own.parameters.values() if parameter.name != "offload"]
    for option in OPTIONS:
        # An enum, because typer takes Literal only since 0.19.
        kind = StrEnum(option.setting, list(option.choices)) if option.choices else option.kind
        parser = option.read if option.words else None
        annotation = Annotated[kind | None, typer.Option(option.flags, help=option.help, parser=parser)]
        parameters.append(
            inspect.Parameter(option.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    with_options.__signature__ = own.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return with_options


def add_offload_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Give an argparse parser the options, and those in MiB once more in bytes: `--slab-mib` and `--slab-bytes`."""
    for option in OPTIONS:
        name, text = f"--{option.spelling.name}", option.help
        if option.is_automatic:
            parser.add_argument(name, choices=tuple(WHEN), default="auto", help=text)
        elif option.kind is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, help=text)
        else:
            read = option.read if option.words else option.kind
            parser.add_argument(name, type=read, choices=option.choices or None, help=text)
        if option.spelling.unit > 1:
            parser.add_argument(f"--{option.setting.replace('_', '-')}", type=int, help="The same in bytes.")


def offload_config(namespace: argparse.Namespace) -> OffloadConfig:
    """Return the settings of a namespace that a parser with `add_offload_options` made."""
    parsed = vars(namespace)
    of_when = {option.parameter: WHEN[parsed[option.parameter]] for option in OPTIONS if option.is_automatic}
    in_bytes = {option.setting: parsed[option.setting] for option in OPTIONS if option.spelling.unit > 1}
    given = {name: value for name, value in in_bytes.items() if value is not None}
    return OffloadConfig(**settings(parsed | of_when) | given)


def _given_type(option: Option) -> Any:
    """Return the type of a field; as `Optional`, because NeMo-Run reads the types and knows no `X | None`."""
    kinds = (option.kind, str) if option.words else (option.kind,)
    return Optional[Union[kinds]]  # noqa: UP007, UP045


OffloadOptions = make_dataclass(
    "OffloadOptions",
    [(option.parameter, _given_type(option), None) for option in OPTIONS],
    kw_only=True,
    module=__name__,
)
"""Base of a dataclass whose fields are a command line's settings: a field for each option, None where not given."""
