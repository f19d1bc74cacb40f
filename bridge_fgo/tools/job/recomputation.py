"""Kinds of recomputation and activation offload that `plan --recommend` compares, as changes of a job's config."""

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
OFFLOADED = "activations offloaded"
OVERLAP_OFF = ("comm_overlap.overlap_moe_expert_parallel_comm=false", "comm_overlap.delay_wgrad_compute=false")
GRAPHS_OFF = ("model.cuda_graph_impl=none",)
TURNED_OFF = ((), OVERLAP_OFF, GRAPHS_OFF, OVERLAP_OFF + GRAPHS_OFF)  # tried in this order, until Bridge accepts a kind


def recomputed_modules(model: Any) -> set[str]:
    """Return what selective recomputation does again; nothing if there is none."""
    is_on = getattr(model, "recompute_granularity", None) == "selective"
    return {*(getattr(model, "recompute_modules", None) or ["core_attn"])} if is_on else set()


def offloaded_beside_graphs(model: Any, modules: list[str]) -> list[str]:
    """Return those of some modules that mcore offloads: of norms before CUDA graphs' modules it only warns."""
    captured = {str(getattr(module, "name", module)) for module in getattr(model, "cuda_graph_modules", None) or []}
    staying = {"attn_norm"} if "attn" in captured else set()
    staying |= {"mlp_norm"} if captured & {"attn", "moe_router"} else set()
    return [name for name in modules if name not in staying]


def kinds(model: Any) -> dict[str, dict[str, Any]]:
    """Return what changes in a model's config by kind: of those above, and of mcore's activation offload.

    That is of all modules whose offload is counted, beside the config's own recomputation where that is not of whole
    layers: of what is recomputed nothing is offloaded. Where the config has it on, one kind is without it; so with
    Transformer Engine's offload of layers, beside which mcore recomputes nothing.
    """
    if getattr(model, "cpu_offloading", False):
        off = {"cpu_offloading": False}
        again = {name: kind | off for name, kind in KINDS.items() if kind is not NONE}
        return {"activations resident": off} | again
    if getattr(model, "fine_grained_activation_offloading", False):
        off = {"fine_grained_activation_offloading": False}
        return KINDS | {"all recomputed": KINDS["all recomputed"] | off, "activations resident": off}
    granularity, again = getattr(model, "recompute_granularity", None), recomputed_modules(model)
    modules = [] if again & {"core_attn", "mla_up_proj"} else ["core_attn", "attn_proj"]
    if "layernorm" not in again:
        modules += [] if getattr(model, "multi_latent_attention", False) else ["qkv_linear"]
        modules += ["mlp_norm"] if getattr(model, "num_moe_experts", None) else []
    if getattr(model, "num_moe_experts", None) and model.moe_grouped_gemm and "moe" not in again:
        modules += ["expert_fc1", *(["moe_act"] if "moe_act" not in again else [])]
    offload = {"fine_grained_activation_offloading": True, "offload_modules": offloaded_beside_graphs(model, modules)}
    return KINDS | ({OFFLOADED: (NONE if granularity == "full" else {}) | offload} if modules else {})


def told(model: Any, changes: dict[str, Any]) -> tuple[str, ...]:
    """Return what changes in a model's config as overrides of Bridge's config."""
    different = {name: value for name, value in changes.items() if getattr(model, name, None) != value}
    values = {
        name: "null" if value is None else str(value).replace("'", "").replace(" ", "")
        for name, value in different.items()
    }
    return tuple(as_named_in(model, f"model.{name}={value}") for name, value in values.items())
