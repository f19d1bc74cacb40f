"""Full-iteration CUDA graphs: forward and backward of a step are captured once, and replayed from then on.

Nothing of this package is captured. States leave before the schedule is called and come back after it: hooks on layers,
and the one of `finalize_model_grads_func`, would run at the capture only. The optimizer step is not in the graph.

A pass that is captured, or runs eagerly before that, needs other memory than those that are replayed: it is not
measured, and goes by no plan. What the graph keeps for its replays counts as needed in every pass.
"""

from __future__ import annotations

import sys
from typing import Any

from bridge_fgo.bridge.session import active_session, all_sessions

MODULE = "megatron.core.full_cuda_graph"


def is_replayed() -> bool:
    """Return whether a training pass that begins now replays a graph."""
    return _graphs().get("training") is not None


def run_schedule(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run, capture or replay forward and backward, and reload after it, where the graph has no Python that would."""
    before = _graphs()
    result = wrapped(*args, **kwargs)
    if any(graph is not before.get(stage) for stage, graph in _graphs().items()):
        for session in all_sessions():
            session.graphs_changed()
    session = active_session()
    if session is not None and not kwargs["forward_only"]:
        session.reload()
    return result


def _graphs() -> dict[str, Any]:
    """Return the graphs of the process by what they are for, "training" and "validation".

    None, or no entry, where there is none: Bridge deletes the entry after training.
    """
    module = sys.modules.get(MODULE)
    return {} if module is None else dict(module.FullCudaGraphWrapper.cuda_graph)
