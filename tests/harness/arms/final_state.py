"""What training left behind on a GPU rank: parameters, master weights and moments, and their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bridge_fgo.engines.lease import attachment_of
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.engines.ranks import gather
from bridge_fgo.states.fsdp import is_fsdp

DIGEST_THREADS = 8
EVERY_MOMENT = ("exp_avg", "exp_avg_sq", "momentum_buffer", "moment2_buffer")  # what Adam and Muon call theirs


def mcore_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield every optimizer that has masters and an optimizer inside, in the order of the chain."""
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    if isinstance(optimizer, MixedPrecisionOptimizer):  # DistributedOptimizer, or Float16OptimizerWithFloat16Params
        yield optimizer
    for child in getattr(optimizer, "chained_optimizers", ()):
        yield from mcore_optimizers(child)


def _fsdp_states(model: Sequence[Any], leaves: Sequence[Any]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (kind, name, tensor) of this rank's states under Megatron-FSDP, as they are between two steps.

    Of a weight its shard, which it keeps, or all of it where it keeps no buffer; of masters and moments the local
    shards. A weight without a master is what the optimizer inside steps itself, and is none.
    """
    masters = set()
    for number, chunk in enumerate(model):
        for index, group in enumerate(chunk.param_and_grad_buffer.parameter_groups):
            buffer = group.model_weight_buffer
            for place, param in enumerate(group.params):
                # Not the buffer's data: between and after the weights are bytes that nobody has written.
                weight = param if buffer is None else buffer.get_item(place, only_shard=True)
                yield "params", f"{number}.{index}.{place}", weight
            if group.main_weight_buffer is not None:
                masters.add(group.main_weight_buffer.data.untyped_storage()._cdata)
    names = {id(p): name for chunk in model for name, p in chunk.param_and_grad_buffer.optimizer_named_parameters}
    for number, leaf in enumerate(leaves):
        for group in leaf.optimizer.param_groups:
            for param in group["params"]:
                name, local = f"{number}.{names[id(param)]}", param._local_tensor
                if local.untyped_storage()._cdata in masters:
                    yield "masters", name, local
                for key in EVERY_MOMENT:
                    if key in leaf.optimizer.state.get(param, {}):
                        yield "moments", f"{name}.{key}", leaf.optimizer.state[param][key]._local_tensor


def _stepped(optimizer: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield what each optimizer inside steps: a name, mcore's optimizer, the parameter."""
    for number, leaf in enumerate(mcore_optimizers(optimizer)):
        if leaf.optimizer is None:  # a rank with nothing to train
            continue
        for group, parameters in enumerate(leaf.optimizer.param_groups):
            for index, parameter in enumerate(parameters["params"]):
                yield f"{number}.{group}.{index}", leaf, parameter


def _state_of(leaf: Any, parameter: Any) -> dict[str, torch.Tensor]:
    """Return the master and the moments of a parameter that the optimizer inside steps, the master first."""
    states = leaf.optimizer.state.get(parameter, {})
    return {
        "master": states.get("master_param", parameter),
        **{key: states[key] for key in EVERY_MOMENT if key in states},
    }


def _dequantized(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight, a quantized one as what it stands for: it has no storage of its own."""
    from megatron.core.fp8_utils import is_float8tensor

    return weight.dequantize() if is_float8tensor(weight) else weight  # type: ignore[no-any-return]


def _weights(model: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all weights with their names."""
    for chunk, module in enumerate(model):
        for name, parameter in module.named_parameters():
            yield f"{chunk}.{name}", parameter


def states(model: Sequence[Any], optimizer: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (kind, name, tensor) of this rank's parameters, and of the masters and moments that exist.

    None is read: while a trainer sleeps, each may be away.

    Masters are the inner optimizer's parameters, or their `master_param` states (fp32, or int16 remainders) where the
    precision-aware optimizer holds them. The package is not asked: what is compared should not depend on what is
    tested.
    """
    leaves = list(mcore_optimizers(optimizer))
    if any(is_fsdp(leaf) for leaf in leaves):
        yield from _fsdp_states(model, leaves)
        return
    for name, weight in _weights(model):
        yield "params", name, weight
    for name, leaf, parameter in _stepped(optimizer):
        master, *moments = _state_of(leaf, parameter).items()
        yield "masters", name, master[1]
        for key, moment in moments:
            yield "moments", f"{name}.{key}", moment


def state_tensors(model: Sequence[Any], optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return what `states` yields, by kind and name; RuntimeError where the memory of a tensor is released."""
    found: dict[str, dict[str, torch.Tensor]] = {"params": {}, "masters": {}, "moments": {}}
    for kind, name, held in states(model, optimizer):
        tensor = _dequantized(held) if kind == "params" else held
        end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.untyped_storage().nbytes() < end:
            raise RuntimeError(f"{kind} {name} cannot be read: its memory is released")
        found[kind][name] = tensor
    return found


def live_state_bytes(model: Sequence[Any], optimizer: Any) -> int:
    """Return the bytes of memory behind masters, but for those that are DDP's own weights, and moments now."""
    of_weights, of_states = {}, {}
    for kind, _, tensor in states(model, optimizer):
        storage = tensor.untyped_storage()
        (of_weights if kind == "params" else of_states)[storage._cdata] = storage.nbytes()
    return sum(nbytes for storage, nbytes in of_states.items() if storage not in of_weights)


def final_state(model: Sequence[Any], optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return the `state_tensors` after training; RuntimeError as they, or where there are no masters or moments."""
    for leaf in mcore_optimizers(optimizer):
        if hasattr(leaf, "synchronize_optimizer_state_for_checkpoint"):
            leaf.synchronize_optimizer_state_for_checkpoint()  # mcore generation 2
    state = state_tensors(model, optimizer)
    for part, tensors in state.items():
        if not tensors:
            raise RuntimeError(f"found no {part} to compare after training")
    return state


@contextmanager
def _handed_out(leaf: Any) -> Iterator[Callable[[Any, Callable[[], dict[str, Any]]], dict[str, Any]]]:
    """Context that gives a function of a parameter and of what reads its states, which are not brought to the GPU."""
    to = attachment_of(leaf)
    if to is None or not isinstance(to.engine, NativeEngine):
        if to is not None:
            to.engine.require_readable(to.source)
        yield lambda parameter, read: read()
        return
    with to.engine.saving(to.source, copies=False):
        yield partial(to.engine.hand_out, to.source)


def digests_by_parameter(model: Sequence[Any], optimizer: Any) -> tuple[dict[str, str], int]:
    """Return the digests of what `final_state` returns, and the bytes of masters and moments; raise as it does.

    States are read where they are, on the GPU or the host, and those of one parameter at a time: they need not fit the
    GPU together, nor the host twice. With an engine of mcore's all of them come to the GPU.
    """
    found: dict[str, list[bytes]] = {"masters": [], "moments": []}
    nbytes = 0
    for each in mcore_optimizers(optimizer):
        with _handed_out(each) as hand_out:
            for _, leaf, parameter in _stepped(each):
                states = hand_out(parameter, partial(_state_of, leaf, parameter))
                master, *moments = digest_each(states.values())
                found["masters"].append(master)
                found["moments"] += moments
                nbytes += sum(tensor.numel() * tensor.element_size() for tensor in states.values())
    for part, digests in found.items():
        if not digests:
            raise RuntimeError(f"found no {part} to compare after training")
    return {
        "params": digest({name: _dequantized(weight) for name, weight in _weights(model)}),
        **{part: joined(digests) for part, digests in found.items()},
    }, nbytes


def joined_digests(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, str]:
    """Return one digest for each part of the state, over all ranks. Collective; all ranks get it."""
    return digests_of_ranks({part: digest(tensors) for part, tensors in state.items()})


def digests_of_ranks(mine: dict[str, str]) -> dict[str, str]:
    """Return one digest for each part, over those of all ranks. Collective; all ranks get it."""
    every = gather(mine)
    if len(every) == 1:
        return mine
    return {part: hashlib.sha256("".join(rank[part] for rank in every).encode()).hexdigest() for part in mine}


def digest(tensors: Mapping[str, torch.Tensor] | Iterable[torch.Tensor]) -> str:
    """Return a sha256 (hex) that tells the raw bytes of tensors, or of a mapping's values, apart, in their order."""
    return joined(digest_each(tensors.values() if isinstance(tensors, Mapping) else tensors))


def digest_each(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """Return the sha256 of each tensor's bytes, computed by several threads: 20 GB would take one some 15 s."""
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        return list(pool.map(_digest_of_one, tensors))


def joined(digests: Iterable[bytes]) -> str:
    """Return the sha256 (hex) of what `digest_each` returned."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest_of_one(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1)
    # As bytes, because numpy has no bfloat16.
    return hashlib.sha256(flat.view(torch.uint8).cpu().numpy().data).digest()
