"""Loads the states of an `fsdp_dtensor` checkpoint into host memory, by wrappers of Bridge's and mcore's functions.

Upstream has all states of a rank on the parameters' device in four steps of a load. Each goes part by part here, or
without the bytes:

1. mcore makes the moments by a step of the Adam inside, on gradients of zeros. It is taken for one part after another,
   whose states then leave (`makes_states`). So what else it does is as upstream's, also to states that the checkpoint
   lacks: it counts, and its weight decay scales masters.
2. The reader writes into DTensors: they have host memory (`fsdp_wrappers.hands_out_states`).
3. The model's `load_state_dict` copies each master onto itself, which torch leaves out, and then all of them to the
   weights, which goes part by part (`rewrites_weights`).
4. Transformer Engine's `load_state_dict` makes each moment anew, beside the loaded ones. It gets the param groups alone
   (`loads_states`).

All states are on the GPU, as without offload, where the Adam's step cannot be divided (`Source.kept_whole_by`), in the
first of these steps, and where moments are in fp16, in the last: Transformer Engine scales them anew. All masters are
there, and no moments, in the third step where weights are in FP8, whose copy is one collective, and where the layout of
gated layers is changed (`moe_mlp_glu_interleave_size`), by copies on the GPU.
"""

from __future__ import annotations

from typing import Any

from bridge_fgo.bridge.fsdp_wrappers import attachments, loading_into, serving
from bridge_fgo.bridge.shadowing import shadowed
from bridge_fgo.bridge.wrappers import Args, Kwargs, Wrapped, arguments_of
from bridge_fgo.engines.attachment import Attachment, attachment_of
from bridge_fgo.states.fsdp import BUFFER, FsdpSource, is_fsdp
from bridge_fgo.states.leaves import leaves
from bridge_fgo.states.megatron import load_groups

MAKING = "_init_optimizer_states_with_dummy_values"
"""The method by which mcore makes the moments before a load."""


def loads_checkpoint(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have states away while a checkpoint is loaded, and afterwards; see the module."""
    optimizer = arguments_of(wrapped, args, kwargs).get("optimizer")
    own = [to for leaf in leaves(optimizer) if is_fsdp(leaf) and (to := attachment_of(leaf)) is not None]
    found = own or attachments()  # a load of weights may be given no optimizer, whose masters they are
    if not found:
        return wrapped(*args, **kwargs)
    for engine, _ in found:
        engine.make_room()
    with serving(), loading_into(found):
        result = wrapped(*args, **kwargs)
    for engine, _ in found:
        engine.make_room()
    return result


def reads_checkpoint(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have it known that a checkpoint is read, and none written, by whoever calls it."""
    with loading_into(attachments()):
        return wrapped(*args, **kwargs)


def makes_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have the moments made part by part."""
    to = attachment_of(instance)
    if to is None or not is_fsdp(instance):
        return wrapped(*args, **kwargs)
    to.engine.make_states(to.source, lambda: wrapped(*args, **kwargs))
    return None


def gives_states(
    to: Attachment, wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs, is_loading: bool
) -> dict[str, Any]:
    """Return a state dictionary of the states themselves, whose bytes nothing reads yet, or which are to be loaded.

    Its entries are in the order of the optimizer's parameters, as without offload, where states are made in that order:
    what follows is a collective for each entry, and parts step in an order that differs from rank to rank.
    """
    if is_loading and not hasattr(instance, MAKING):
        to.engine.require_writable(to.source)  # this mcore makes them in another way
    result = wrapped(*args, **kwargs)
    names = [instance._param_name(param) for group in instance.optimizer.param_groups for param in group["params"]]
    state = result["state"]
    return {**result, "state": {name: state[name] for name in dict.fromkeys([*names, *state]) if name in state}}


def loads_states(to: Attachment, wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have param groups loaded, and states only where they are not the optimizer's own, loaded where they are."""
    source, adam = to.source, instance.optimizer
    assert isinstance(source, FsdpSource)
    load = adam.load_state_dict

    def load_what_differs(state_dict: dict[str, Any]) -> None:
        if source.has_own(state_dict):
            load_groups(adam, state_dict)
            return
        to.engine.require_writable(source)
        load(state_dict)
        to.engine.states_replaced(source)

    with shadowed(adam, {"load_state_dict": load_what_differs}):
        return wrapped(*args, **kwargs)


def rewrites_weights(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have the weights of a model that Megatron-FSDP shards made anew of its masters part by part."""
    buffer = getattr(instance, BUFFER)
    for engine, source in attachments():
        assert isinstance(source, FsdpSource)
        # It has one optimizer, for dense parameters and experts alike.
        if any(getattr(chunk, BUFFER) is buffer for chunk in source.optimizer.model_chunks):
            return engine.rewrite_weights(source, lambda: wrapped(*args, **kwargs))
    return wrapped(*args, **kwargs)


def interleaves_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the masters writable: the layout of gated layers is changed by copies on the GPU, in a load to them."""
    for engine, source in attachments():
        engine.require_writable(source, masters_only=True)
    return wrapped(*args, **kwargs)
