"""Kinds of recomputation that `plan --recommend` compares, and what Bridge says of each for a job."""

from __future__ import annotations

from typing import Any

from bridge_fgo.bridge.compat import as_named_in

NONE: dict[str, Any] = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
"""Settings of the model's config, as those below."""
OF_ATTENTION = NONE | {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
KINDS = {
    "no recomputation": NONE,
    "attention recomputed": OF_ATTENTION,
    "experts recomputed": OF_ATTENTION | {"recompute_modules": ["moe"]},
    "MLP recomputed": OF_ATTENTION | {"recompute_modules": ["mlp"]},
    "all recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
OVERLAP_OFF = ("comm_overlap.overlap_moe_expert_parallel_comm=false", "comm_overlap.delay_wgrad_compute=false")
GRAPHS_OFF = ("model.cuda_graph_impl=none",)
TURNED_OFF = ((), OVERLAP_OFF, GRAPHS_OFF, OVERLAP_OFF + GRAPHS_OFF)
"""Overrides that are tried in this order, until Bridge accepts a kind with them."""


def told(model: Any, changes: dict[str, Any]) -> tuple[str, ...]:
    """Return what changes in a model's config as overrides of Bridge's config."""
    different = {name: value for name, value in changes.items() if getattr(model, name, None) != value}
    values = {name: "null" if value is None else str(value).replace("'", "") for name, value in different.items()}
    return tuple(as_named_in(model, f"model.{name}={value}") for name, value in values.items())
