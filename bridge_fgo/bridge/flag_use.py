"""Whether any config that Bridge has validated asked for the offload, and whether to make it ask. For `bridge-fgo run`.

No torch here: `run` asks also where the script has imported nothing.
"""

from __future__ import annotations

from typing import Any

from bridge_fgo.bridge.compat import FLAG, flag_is_set

_sets_flag = False
_was_set = False


def set_flag_in_every_config() -> None:
    """Have the flag set in each config, before Bridge validates it."""
    global _sets_flag
    _sets_flag = True


def before_validation(optimizer_config: Any) -> None:
    """Set the flag of an OptimizerConfig where that was asked for."""
    if _sets_flag:
        setattr(optimizer_config, FLAG, True)


def after_validation(optimizer_config: Any) -> None:
    """Note whether an OptimizerConfig has the flag set."""
    global _was_set
    _was_set = _was_set or flag_is_set(optimizer_config)


def was_set() -> bool:
    """Return whether the flag was set in any config so far."""
    return _was_set
