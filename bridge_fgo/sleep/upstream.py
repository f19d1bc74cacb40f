"""mcore's own verbs of sleep and wake, by this package's memory: exact pinned buffers, and nothing copied twice.

They know one buffer or one optimizer at a time, on this rank alone, and may run no collective. So they copy a buffer
whole and not its shard; `Residency` moves less.

A limit of host memory is one of the process for all of them, and for what the flag has taken before: what does not fit
stays on the GPU, and a warning says so.
"""

from __future__ import annotations

import math
import warnings
import weakref
from dataclasses import replace
from typing import Any

import torch

from bridge_fgo.config import OffloadConfig, readable
from bridge_fgo.engines.engine import attachment_of
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.host_buffer import page_lock
from bridge_fgo.memory.storage_slab import StorageSlab, find_aliases
from bridge_fgo.sleep.gradients import Gradients
from bridge_fgo.sleep.moved import return_to_driver, wait_for_gpu
from bridge_fgo.sleep.refusals import STATES, buffer_refusals, refusal_of
from bridge_fgo.sleep.states import OptimizerStates
from bridge_fgo.sleep.weights import WeightSlab, named_weights, sums_of
from bridge_fgo.states.distributed import UPSTREAM_OFFLOADERS

BUFFER = "_bridge_fgo_sleep"
"""Attribute of a `_ParamAndGradBuffer` that holds its `Buffer`."""

COMES_BY = "the reload_from_cpu() of DDP's buffers"

_buffers = weakref.WeakSet["Buffer"]()
_states = weakref.WeakSet[OptimizerStates]()


def _room(limit: float) -> float:
    """Return the bytes of host memory that a limit leaves."""
    return limit - sum(each.host_bytes for each in (*_buffers, *_states))


def _tell_what_stays(nbytes: int, what: str) -> None:
    if nbytes:
        warnings.warn(
            f"the limit of host memory has no room for {readable(nbytes)} of {what}, which stay on the GPU",
            stacklevel=3,
        )


class Buffer:
    """The parameters and gradients of one of mcore's `_ParamAndGradBuffer`s; `pins`: whether to page-lock."""

    def __init__(self, buffer: Any, pins: bool) -> None:
        self._buffer, self._pins = buffer, pins
        self._gradients: Gradients | None = None
        self._weights: WeightSlab | None = None
        _buffers.add(self)

    def unguard(self) -> None:
        """Leave what is away to mcore's own `reload_from_cpu`."""
        for slab in self._slabs(self._gradients, self._weights):
            slab.unguard()

    @staticmethod
    def _slabs(gradients: Gradients | None, weights: WeightSlab | None) -> list[StorageSlab]:
        return [*(() if gradients is None else gradients.slabs), *(() if weights is None else (weights,))]

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for the parameters, from their first offload on."""
        return 0 if self._weights is None else self._weights.host_bytes

    @torch.no_grad()
    def offload(self, params: bool, grads: bool, limit: float) -> None:
        """Drop gradients, and offload parameters, of which what has changed is copied; what is away stays away."""
        buffer = self._buffer
        for refusal in buffer_refusals(buffer):
            raise ValueError(refusal)
        gradients = weights = None
        if grads and _has_memory(buffer.grad_data):
            gradients = self._gradients = self._gradients or Gradients([buffer], {}, COMES_BY)
        needed = buffer.param_data.untyped_storage().nbytes() if params and _has_memory(buffer.param_data) else 0
        if needed and self._weights is None and needed > _room(limit):
            _tell_what_stays(needed, "a DDP buffer's parameters")
        elif needed:
            named, within = named_weights(buffer, {}), [("", param) for param in buffer.params]
            weights = self._weights = self._weights or WeightSlab(
                buffer.param_data, "a DDP buffer's parameters", COMES_BY, named=named, params=within
            )
        slabs = self._slabs(gradients, weights)
        find_aliases(slabs)
        for slab in slabs:
            slab.require_resizable()
        if weights is not None:
            # Race: an all-gather that mcore has not waited for may still write the weights that are copied, or an
            # earlier reload may still read the host memory that they are copied to.
            wait_for_gpu(buffer.grad_data.device)
            hosts = weights.map_host()
            if self._pins and hosts:
                page_lock(hosts)
            weights.copy_changed(sums_of([weights])[weights])
        # Race: who takes the memory next does not wait for the copy, nor for kernels on other streams.
        wait_for_gpu(buffer.grad_data.device)
        # mcore's own `reload_from_cpu` goes by these, as after an uninstall.
        if gradients is not None:
            buffer.grad_data_size = buffer.grad_data.storage().size()
        if weights is not None:
            assert weights.host is not None
            buffer.param_data_size = buffer.param_data.storage().size()
            buffer.param_data_cpu = weights.host.tensor.view(buffer.param_data.dtype)
            weights.columnwise.drop()
        for slab in slabs:
            slab.empty()

    @torch.no_grad()
    def reload(self, params: bool, grads: bool) -> None:
        """Reload parameters, and gradients as zeros; what is on the GPU stays as it is."""
        if params and self._weights is not None and self._weights.is_away:
            try:
                self._weights.fill(zeroed=True)
                self._weights.copy_in()
            except BaseException:
                self._weights.empty()  # else a second call would take zeros for weights
                raise
            self._weights.columnwise.make()
        if grads and self._gradients is not None and self._gradients.is_away:
            self._gradients.reload()
            self._buffer.grad_data_size = 0


def _has_memory(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.untyped_storage().nbytes() > 0


def leave_to_mcore() -> None:
    """Have mcore's own methods bring back what is away, as after an uninstall."""
    for buffer in list(_buffers):
        buffer.unguard()


def mover_of(buffer: Any, pins: bool) -> Buffer:
    """Return what moves a buffer, made on the first call."""
    found: Buffer | None = vars(buffer).get(BUFFER)
    if found is None:
        found = Buffer(buffer, pins and buffer.grad_data.device.type == "cuda")
        setattr(buffer, BUFFER, found)
    return found


def can_move(optimizer: Any) -> bool:
    """Return whether the native engine can move the states of a DistributedOptimizer."""
    if getattr(optimizer, "is_stub_optimizer", False) or refusal_of(optimizer):
        return False
    if (to := attachment_of(optimizer)) is not None:
        return isinstance(to.engine, NativeEngine)
    return all(getattr(optimizer, name, None) is None for name in UPSTREAM_OFFLOADERS)


def can_restore(optimizer: Any) -> bool:
    """Return whether `offload_states` has offloaded the states, or would."""
    return STATES in vars(optimizer) or (attachment_of(optimizer) is not None and can_move(optimizer))


def offload_states(optimizer: Any, config: OffloadConfig, limit: float) -> None:
    """Do what mcore's `offload_to_cpu` is for: offload all states, and return their memory to the driver.

    While they are away the optimizer is attached to its engine, which serves whoever reads or steps it.
    """
    states = _states_of(optimizer, config, limit)
    device = states.sources[0].device
    states.require_whole()
    wait_for_gpu(device)
    states.attach()  # first, so that a step finds what is away if the rest fails
    try:
        states.start_offload()
        states.end_offload()
    except BaseException:
        states.give_up_offload()
        raise
    wait_for_gpu(device)
    return_to_driver(device)
    _tell_what_stays(states.engine.unhosted_bytes, "an optimizer's state")


def restore_states(optimizer: Any) -> None:
    """Do what mcore's `restore_from_cpu` is for: reload all states."""
    states = _states_of(optimizer, None)
    states.reload()
    states.finish_reload()


def _states_of(optimizer: Any, config: OffloadConfig | None, limit: float = math.inf) -> OptimizerStates:
    """Return what moves the states: by an engine that is there, or by one that is made with `config`."""
    states: OptimizerStates | None = vars(optimizer).get(STATES)
    if states is not None:
        return states
    if attachment_of(optimizer) is not None:
        return OptimizerStates(optimizer, alone=True)
    assert config is not None, "states are reloaded that were never offloaded"
    whole = replace(
        config, engine="native", master_remainders=False, fraction=1.0, gpu_memory_budget_gib=None,
        moments=True, master_weights=True,
    )  # fmt: skip
    states = OptimizerStates(optimizer, lambda: whole, alone=True, host_bytes=_room(limit))
    _states.add(states)
    return states
