"""Overrides of Bridge's config, `section.field=value`, by Bridge's own function, with errors that a user can act on."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Sequence
from typing import Any

from bridge_fgo.bridge.compat import TRANSFORMER

WANTED: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number"}


def overridden(config: Any, overrides: Sequence[str]) -> Any:
    """Return the ConfigContainer with overrides in Bridge's own syntax (Hydra's), as training takes them.

    Raises:
        ValueError: an override is wrong; names it, and the setting that it may have meant.
    """
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    for override in overrides:
        _refuse_what_changes_nothing(config, override)
    try:
        changed = process_config_with_overrides(config, cli_overrides=list(overrides))
    except Exception as error:  # Hydra's, OmegaConf's and Bridge's have no common class
        not_there = re.search(r"Could not override '([^']+)'", str(error))
        # Hydra advises to append what there is not, which nothing would ever read.
        said = " ".join(str(error).split())
        why = f"{type(error).__name__}: {said}" if not_there is None else unknown(config, not_there[1])
        raise ValueError(f"overrides {' '.join(overrides)}: {why}") from error
    for override in overrides:
        _refuse_a_value_of_another_type(changed, override)
    return changed


def refuse_without_value(overrides: Sequence[str]) -> None:
    """Raise ValueError for an override without `=`, which reading tells; `~SECTION.FIELD`, which deletes, has none."""
    for place, override in enumerate(overrides):
        name, equals, _ = override.partition("=")
        if name != name.strip():
            raise ValueError(f"override {override!r}: leave out the spaces around '='")
        if not equals and not override.startswith("~"):
            value = "".join(overrides[place + 1 : place + 2])
            value = value if value and "=" not in value else "VALUE"
            here = f", here {override}={value}" if "." in override else ""
            raise ValueError(f"override {override!r} has no '=': write SECTION.FIELD=VALUE{here}")


def _refuse_what_changes_nothing(config: Any, override: str) -> None:
    """Refuse what Bridge's function passes over, or would leave a section without its settings.

    It adds to dictionaries and deletes from them; a section's fields are those of its class.
    """
    name, _, text = override.partition("=")
    *sections, field = name.lstrip("+~").split(".")
    section = config
    for part in sections:
        section = _settings(section).get(part)
    if not dataclasses.is_dataclass(section):
        return
    if name.startswith("+") and field not in section.__dataclass_fields__:
        raise ValueError(f"override {override}: {'.'.join(sections)} has no field {field}, and nothing would read one")
    if name.startswith("~"):
        raise ValueError(f"override {override}: a field cannot be deleted; set {name[1:]}=null, or leave it out")
    value = getattr(section, field, None)
    if dataclasses.is_dataclass(value) and text != "null" and field != "mixed_precision":  # which has names too
        raise ValueError(f"override {override}: {field} is a section: write {field}.FIELD=VALUE")


def _refuse_a_value_of_another_type(config: Any, override: str) -> None:
    """Refuse text or a fraction where the field holds numbers, or whole ones; Bridge's function checks names alone."""
    name, _, text = override.lstrip("+~").partition("=")
    *sections, field = name.split(".")
    section = config
    for part in sections:
        section = _settings(section).get(part)
    if not dataclasses.is_dataclass(section):
        return
    try:
        hint = typing.get_type_hints(type(section)).get(field)
    except (NameError, TypeError):  # an annotation that only a type checker can read
        return
    types = set(typing.get_args(hint) or (hint,)) - {type(None)}
    if not types or not types <= WANTED.keys():
        return
    kinds = [kind for kind in WANTED if kind in types or (kind is int and float in types)]
    value = getattr(section, field)
    if value is not None and not isinstance(value, tuple(kinds)):
        wanted = " or ".join(WANTED[kind] for kind in WANTED if kind in types)
        raise ValueError(f"override {name}={text}: use {wanted}")


def unknown(config: Any, name: str) -> str:
    """Return that a config, or a dict of its settings' names, lacks a setting, and the one that it may have meant."""
    there, known = _settings(config), []
    for part in name.split("."):
        if part not in there:
            close = difflib.get_close_matches(part, there, 1)
            if part in _settings(there.get(TRANSFORMER)):  # of a model that a builder builds
                close = [f"{TRANSFORMER}.{part}"]
            meant = f"; did you mean {'.'.join([*known, close[0]])}?" if close else ""
            added = f"; +{name}=VALUE adds it" if known == ["env_vars"] else ""
            return f"there is no setting {name}{meant}{added}"
        known.append(part)
        there = _settings(there[part])
    return f"{name} cannot be overridden"  # a function, which Bridge leaves out of what overrides change


def _settings(section: Any) -> dict[str, Any]:
    """Return the settings of a section by name; none where it is a value, or not set."""
    return section if isinstance(section, dict) else getattr(section, "__dict__", {})
