"""Fine-grained optimizer-state offload for Megatron-Bridge.

    import bridge_fgo
    bridge_fgo.install()
    cfg.optimizer.offload_optimizer_states = True

Importing this package imports neither torch nor Megatron.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bridge_fgo.bridge.installation import Installation, install, uninstall
from bridge_fgo.config import OffloadConfig

if TYPE_CHECKING:
    from typing import Any

    from bridge_fgo.bridge.residency import Residency
    from bridge_fgo.figures import Stats

__version__ = "0.1.0"
__all__ = ["Installation", "OffloadConfig", "Residency", "install", "reload_states", "stats", "uninstall"]


def __getattr__(name: str) -> Any:
    if name == "Residency":  # only when it is asked for, because it imports torch
        from bridge_fgo.bridge.residency import Residency

        return Residency
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def reload_states() -> None:
    """Make every offloaded state of this rank readable and writable, until the next training step or evaluation.

    Code that reads or changes `optimizer.state` or `param.main_param` between steps is right without it: a tensor that
    is offloaded brings its slab back when it is used. This brings all slabs in one go, and serves code that no tensor
    can see: views that were made before, and calls into C++. The work that uses them goes to the current stream.

    Raises:
        RuntimeError: states cannot be brought back: there is no memory for them, weights were changed while their
            masters were offloaded in part, or an error had come while a part of them was on its way.
    """
    if "bridge_fgo.bridge.session" in sys.modules:
        from bridge_fgo.bridge.session import all_sessions

        for session in all_sessions():
            session.engine.require_readable()
            session.engine.require_writable()


def stats() -> Stats | None:
    """Return the figures of the newest training step on this rank, or None before anything attached.

    A snapshot: it does not change as training goes on, and is there after training too, until `uninstall`. See
    `bridge_fgo.figures.Stats`.
    """
    if "bridge_fgo.bridge.session" not in sys.modules:
        return None  # nothing was installed yet, and torch need not be imported to say so
    from bridge_fgo.bridge.session import newest_stats

    return newest_stats()
