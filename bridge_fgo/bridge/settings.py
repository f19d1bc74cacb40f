"""The settings that the patched bindings go by: those given to `install`, and those of the run's own config.

`cfg.optimizer.offload` holds, by name, the settings of `OffloadConfig` that the run sets, and None for the others. It
is a plain dict, because Bridge's overrides change neither a frozen dataclass nor one of a class outside of Bridge. Once
a config is validated it holds all settings in force, so that the saved run config has them. No torch here: `bridge-fgo
run` asks for the flag even if the script has imported nothing.
"""

import dataclasses
import difflib
import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from bridge_fgo.config import OffloadConfig, needing_offload

DEFAULTS = OffloadConfig()
SETTINGS = "offload"  # the field of OptimizerConfig
NAMES = tuple(field.name for field in dataclasses.fields(OffloadConfig))

_installed: OffloadConfig | None = None
_written: list[tuple[weakref.ref[Any], dict[str, Any]]] = []  # configs that were filled, and what they held before


def nothing_set() -> dict[str, Any]:
    """Return the field's default: every name, and no value."""
    return dict.fromkeys(NAMES)


def set_installed_config(config: OffloadConfig | None) -> None:
    """Keep the settings of the installation; with None, as it is undone, give each config back what it held."""
    global _installed
    _installed = config
    if config is None:
        for reference, before in _written:
            if (optimizer_config := reference()) is not None:
                setattr(optimizer_config, SETTINGS, before)
        _written.clear()


def is_installed() -> bool:
    """Return whether the package is installed: `train()` holds the wrapped step even after an uninstall in mid-run."""
    return _installed is not None


def installed_config() -> OffloadConfig:
    """Return the settings given to `install`; a wrapper runs only if there are some."""
    assert _installed is not None, "nothing is installed"
    return _installed


def given_settings(optimizer_config: Any) -> dict[str, Any]:
    """Return the settings that an OptimizerConfig, saved or not, sets itself; ValueError for one that there is not."""
    field = getattr(optimizer_config, SETTINGS, None)
    if field is None:
        return {}
    given = vars(field) if isinstance(field, SimpleNamespace) else field
    if type(given).__module__ == "unittest.mock":  # a mock's attribute is no setting
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"optimizer.{SETTINGS}={field!r}: use a dict of OffloadConfig's settings, such as {{'fraction': 0.5}}"
        )
    for name in given:
        if name not in NAMES:
            near = difflib.get_close_matches(str(name), NAMES, 1)
            use = f"did you mean {near[0]}?" if near else f"use one of {', '.join(NAMES)}"
            raise ValueError(f"optimizer.{SETTINGS}.{name}: there is no such setting; {use}")
    return {name: value for name, value in given.items() if value is not None}


def settings_of(optimizer_config: Any, installed: OffloadConfig | None = None) -> OffloadConfig:
    """Return the settings in force for an OptimizerConfig: its own, and the installed ones if it sets none.

    The config may be the section of a saved one. `installed` is what else was given, on a command line for example;
    None for what `install` was given.

    Raises:
        ValueError: as `given_settings`; a value is refused by OffloadConfig; or both set the same to different values.
            A setting at its default counts as not given to `install`.
    """
    installed = installed_config() if installed is None else installed
    given = given_settings(optimizer_config)
    for name, value in given.items():
        other = getattr(installed, name)
        if other not in (value, getattr(DEFAULTS, name)):
            raise ValueError(
                f"optimizer.{SETTINGS}.{name}={value!r} in the run's config, and {name}={other!r} given to "
                "bridge_fgo.install or as an option: leave out one of them"
            )
    return dataclasses.replace(installed, **given) if given else installed


def idle_settings(optimizer_config: Any) -> list[str]:
    """Return the settings, of an OptimizerConfig and of `install`, that have no effect while the flag is unset."""
    installed = {name: value for name, value in vars(installed_config()).items() if value != getattr(DEFAULTS, name)}
    places = {f"optimizer.{SETTINGS}": given_settings(optimizer_config), "OffloadConfig": installed}
    return [f"{place}.{name}={each!r}" for place in places for name, each in needing_offload(places[place]).items()]


def write_settings(optimizer_config: Any) -> None:
    """Write the settings in force into an OptimizerConfig with that field, to be saved, until `install` is undone."""
    before = getattr(optimizer_config, SETTINGS, None)
    if isinstance(before, dict):
        in_force = dataclasses.asdict(settings_of(optimizer_config))
        if in_force != before:
            setattr(optimizer_config, SETTINGS, in_force)
            _written.append((weakref.ref(optimizer_config), before))


@dataclasses.dataclass
class Caller:
    """Changes how each config is validated, for a command of this package, which learns whether the flag was set."""

    sets_flag: bool = False  # whether the flag is set first; for `bridge-fgo run`
    saw_flag: bool = False  # whether the flag was set in any config so far
    refuses: bool = False  # whether the command lists the refusals, so that validation refuses none of them


caller = Caller()
