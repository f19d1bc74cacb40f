"""The names of Bridge's settings, kept with this package: a misspelt one is told before Megatron is imported.

`python tests/tools/setting_names.py` keeps them anew; a test holds them against the installed Bridge.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from bridge_fgo.bridge.settings import NAMES, SETTINGS
from bridge_fgo.config import OffloadConfig
from bridge_fgo.recipes.catalog import RECIPES
from bridge_fgo.recipes.overrides import unknown
from bridge_fgo.tools.job import kept_files
from bridge_fgo.tools.job.answers import config_at_once, installed_versions
from bridge_fgo.tools.job.target import config_functions, is_saved_config

type Names = dict[str, Names | None]
"""Settings by name: those within a section, or None for a value, and for what may have any names."""

OPTIONS = ("system", "gpus", "gpus_per_node", "vocab_size", "link_gbs", "activations_gb")
"""Of `plan` and `doctor`, which are often written as overrides: so they are in other commands."""
FILE = Path(__file__).with_name("setting_names.json.gz")
"""Has the `names`, and the `versions` of the Megatron that they are of."""
OF_OFFLOAD: Names = {"optimizer": {SETTINGS: dict.fromkeys(NAMES)}}


def refuse_overrides_at_once(target: str, overrides: Sequence[str] | None) -> None:
    """Raise ValueError for an override of a setting that there is not in any class that its section may be of.

    And for a value that a setting of the offload does not take. What passes may still be wrong. With another Megatron
    installed, and of a user's own functions, which may have classes of their own, those settings alone are known.
    """
    known = _known(target)
    for name, _, text in (override.lstrip("~").partition("=") for override in overrides or ()):
        setting = name.removeprefix(f"optimizer.{SETTINGS}.")
        of = known if setting == name else OF_OFFLOAD
        if of and name != "hf_config" and not name.startswith("+") and not _has(of, name.split(".")):
            said = _as_option(name) or unknown(of, name)
            raise ValueError(f"overrides {' '.join(overrides or ())}: {said}")
        if of is OF_OFFLOAD and text and "$" not in text:  # which Hydra replaces
            with suppress(yaml.YAMLError):
                OffloadConfig(**{} if (value := yaml.safe_load(text)) is None else {setting: value})


def _as_option(name: str) -> str:
    """Return how what is no override is given; "" if that is not known."""
    if name in NAMES:
        return f"write optimizer.{SETTINGS}.{name}=VALUE"
    return f"write --{name.replace('_', '-')} VALUE" if name in OPTIONS else ""


def _has(names: Names | None, parts: list[str]) -> bool:
    return names is None or not parts or (parts[0] in names and _has(names[parts[0]], parts[1:]))


def _known(target: str) -> Names:
    """Return what may be overridden of a target's config; {} if that is not known."""
    kept = kept_files.read(FILE)
    is_bridges = target in RECIPES or target in config_functions() or target.startswith("megatron.")
    if installed_versions() not in ({}, kept["versions"]) or not (is_bridges or is_saved_config(target)):
        return {}
    found: Names = kept["names"]
    for section, values in config_at_once(target).items() if is_saved_config(target) else ():
        of_class = found.get(section)
        is_own = isinstance(values, dict) and not str(values.get("_target_", "megatron.")).startswith("megatron.")
        found[section] = None if is_own or of_class is None else of_class | dict.fromkeys(values or ())
    return found
