"""The frameworks whose functions `install(frameworks=...)` patches, by name. No torch here."""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "BRIDGE_FGO_FRAMEWORKS"  # environment variable for the argument `frameworks` of `install`

LIMIT, FOLDER = "BRIDGE_FGO_HOST_MEMORY_LIMIT_GIB", "BRIDGE_FGO_FROZEN_FOLDER"
"""Environment variables that stand for `host_memory_limit_gib` and `frozen_folder` of each `Residency`."""

VARIABLES = (VARIABLE, LIMIT, FOLDER)  # all that the package reads

VERL = ("verl.utils.megatron_utils", "verl.workers.engine.megatron.transformer_impl")
SKYRL = ("skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy",)
NEMO_RL = (
    "nemo_rl.models.policy.workers.megatron_policy_worker",
    "nemo_rl.models.value.workers.megatron_value_worker",
)
# those that sleep by torch_memory_saver alone
MEMORY_SAVED = {name: (f"{name}.backends.megatron_utils.actor",) for name in ("slime", "miles")}
# the modules of each framework that patches wait for
FRAMEWORKS: dict[str, tuple[str, ...]] = {"verl": VERL, "skyrl": SKYRL, "nemo_rl": NEMO_RL, **MEMORY_SAVED}
MODULES = tuple(module for modules in FRAMEWORKS.values() for module in modules)


def refuse_misspelt() -> None:
    """Raise ValueError if the environment has a variable that is one of these except for two letters, case or unit."""
    for name, given in os.environ.items():
        for meant in VARIABLES if name not in VARIABLES else ():
            spelt = (meant, meant.removesuffix("_GIB"))
            if not name.startswith(f"{meant}_") and any(_letters_between(name.upper(), each) <= 2 for each in spelt):
                raise ValueError(
                    f"the environment variable {name}={given!r}: nothing reads it; did you mean {meant}? Rename it, or "
                    "leave it out"
                )


def _letters_between(name: str, other: str) -> int:
    """Return how many letters have to be changed, added or left out of one name for the other."""
    if abs(len(name) - len(other)) > 2:  # the environment has many variables
        return 3
    changes = difflib.SequenceMatcher(None, name, other, autojunk=False).get_opcodes()
    return sum(max(i - before, j - begin) for tag, before, i, begin, j in changes if tag != "equal")


def host_memory_limit_gib() -> float | None:
    """Return the limit that the environment has, None if it has none, or raise ValueError."""
    if not (given := os.environ.get(LIMIT, "")):
        return None
    try:
        limit = float(given)
    except ValueError:
        limit = 0.0
    if not limit > 0:
        raise ValueError(f"the environment variable {LIMIT}={given!r}: use a number of GiB above 0, or leave it out")
    return limit


def require_frozen_folder() -> None:
    """Raise ValueError if the environment names a folder for frozen parameters that can have no files."""
    if not (given := os.environ.get(FOLDER, "")):
        return
    from bridge_fgo.memory.host_buffer import FileBuffer  # imports torch

    try:
        FileBuffer(1, Path(given))
    except ValueError as error:
        raise ValueError(f"the environment variable {FOLDER}, which stands for {error}") from error


def framework_names(asked: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the names that are asked for: by "auto" all, by None those of the environment variable, or ValueError."""
    setting = "install(frameworks=...)" if asked is not None else f"the environment variable {VARIABLE}"
    given = os.environ.get(VARIABLE, "") if asked is None else asked
    names: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else [given]
    if isinstance(given, str):
        names = [name for word in given.split(",") if (name := word.strip())]
    for name in names:
        if name not in ("auto", *FRAMEWORKS):
            raise ValueError(
                f"{setting}: there is no framework {name!r}; use 'auto' or any of {', '.join(map(repr, FRAMEWORKS))}"
            )
    return tuple(FRAMEWORKS) if "auto" in names else tuple(dict.fromkeys(names))


def require_environment() -> None:
    """Raise ValueError if any of the variables has a wrong value, whether it will be needed or not."""
    framework_names(None)
    host_memory_limit_gib()
    require_frozen_folder()
