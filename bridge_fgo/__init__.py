"""Fine-grained optimizer-state offload for Megatron-Bridge.

    import bridge_fgo
    bridge_fgo.install()  # before anything uses the GPU
    cfg.optimizer.offload_optimizer_states = True

`import bridge_fgo` imports neither torch nor Megatron.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from bridge_fgo.bridge.framework_names import VARIABLE, refuse_misspelt
from bridge_fgo.bridge.installation import Installation, install, install_with_frameworks, uninstall
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
    """Reload all offloaded states of this rank; they stay on the GPU until the next training step or evaluation.

    Code that reads or writes `optimizer.state` or `param.main_param` between steps works without this call: an
    offloaded tensor reloads its slab when it is used. Call it to reload all slabs at once, and before code that PyTorch
    cannot intercept: C++ code that takes the tensors. Use the states on the current stream.

    Raises:
        RuntimeError: the states cannot be reloaded: there is no GPU memory for them, weights were changed while their
            masters were copied in part, or an error interrupted an earlier copy.
    """
    if "bridge_fgo.bridge.session" in sys.modules:
        from bridge_fgo.bridge.session import all_sessions

        for session in all_sessions():
            session.engine.require_readable()
            session.engine.require_writable()


def stats() -> Stats | None:
    """Return the figures of the newest training step on this rank; None before the offload is attached.

    The result is a snapshot, which later steps do not change. The figures are kept after training, until `uninstall`.
    See `bridge_fgo.figures.Stats`.
    """
    if "bridge_fgo.bridge.session" not in sys.modules:
        return None  # nothing was installed yet, and torch need not be imported to say so
    from bridge_fgo.bridge.session import newest_stats

    return newest_stats()


refuse_misspelt()
if os.environ.get(VARIABLE):
    install_with_frameworks()
