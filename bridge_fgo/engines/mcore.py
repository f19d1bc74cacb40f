"""Drives mcore's own offloaders, one for each optimizer, by their three verbs: offload, release, reload.

Upstream's code copies, pins, and keeps to no budget. Each member supplies the waits that its generation lacks.

- Generation 1, `OptimizerStateOffloader`: in Megatron-LM's `dev` branch from January to 2026-08-18, and in #6544. Its
  root flaw is that a reload in flight is forgotten: only the inner optimizer step waits for it. The step in chunks that
  #6544 adds is not driven.
- Generation 2, `ChunkedOptimizerStateOffloader`: in `dev` from 2026-08-18 (#6244). States stay in host memory between
  updates, and `optimizer.step()` streams them through the GPU. Its step, its state dictionaries and its checkpoints
  restore what they read.
"""

from collections.abc import Iterator, Sequence
from typing import Any, override

import torch

from bridge_fgo.engines.engine import Engine
from bridge_fgo.memory.host_memory import power_of_two_at_least
from bridge_fgo.memory.meters import Traffic
from bridge_fgo.memory.slab import SlabStateMachine
from bridge_fgo.memory.state_tensor import Bundle
from bridge_fgo.states.distributed import MegatronSource, live_bytes
from bridge_fgo.states.source import Source


class Member:
    """Drives the offloader that mcore built into one DistributedOptimizer: the part that both generations share.

    Counts the bytes of its states that are off the GPU. The verbs of both generations are those of an engine.
    """

    name: str  # what the engine is called
    verbs: tuple[str, ...]  # methods by which a DistributedOptimizer class with upstream's offloader is known
    interrupted = ""  # what interrupted a move; what upstream does itself is not watched

    def __init__(self, source: MegatronSource, traffic: Traffic) -> None:
        self.optimizer: Any = source.optimizer
        self.states: list[Bundle] = source.states()
        self.state_bytes = self.planned_bytes = sum(bundle.nbytes for bundle in self.states)
        self._offloader: Any = source.upstream_offloader()
        self._home = source.device
        self._traffic = traffic
        self._away = 0

    @classmethod
    def is_available(cls, optimizer_class: type) -> bool:
        """Return whether a DistributedOptimizer class has the offloader's verbs."""
        return all(hasattr(optimizer_class, verb) for verb in cls.verbs)

    def existing_bytes(self) -> int:
        """Return the bytes of the states that exist, wherever they are."""
        tensors = (state.read() for bundle in self.states for state in bundle.states)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def _bytes_off_gpu(self) -> int:
        return self.existing_bytes() - live_bytes(self.states, self._home)

    def _count_away(self) -> None:
        nbytes = self._bytes_off_gpu()
        self._traffic.out += nbytes
        self._traffic.release(nbytes - self._away)
        self._away = nbytes

    def _count_back(self, nbytes: int) -> None:
        self._traffic.back += nbytes
        self._traffic.released -= self._away
        self._away = 0


class Generation1(SlabStateMachine, Member):
    """Drives it as one slab for all states of an optimizer built with `config.offload_optimizer_states=True`."""

    name = "mcore generation 1"
    verbs = ("offload_states", "release_offloaded_gpu_states", "reload_offloaded_states")

    def __init__(self, source: MegatronSource, traffic: Traffic) -> None:
        SlabStateMachine.__init__(self, traffic.touches)
        Member.__init__(self, source, traffic)

    def host_buffers(self) -> list[Any]:
        """Return upstream's page-locked host tensors."""
        masters = [buffer for group in self._offloader._shard_fp32_from_float16_cpu_buffers for buffer in group]
        return masters + [b for by_key in self._offloader._opt_state_cpu_buffers.values() for b in by_key.values()]

    @override
    def _start_offload(self) -> None:
        if any(self.optimizer.optimizer.state.values()):
            # Upstream counts the moments as made only after a step of this process, so those of a checkpoint would
            # stay on the GPU in the first forward after a resume.
            self._offloader.mark_optimizer_states_initialized()
        self.optimizer.offload_states()

    @override
    def _release(self) -> None:
        self.optimizer.release_offloaded_gpu_states()  # which keeps the memory from reuse with record_stream
        self._count_away()

    @override
    def _start_reload(self) -> None:
        nbytes = self._bytes_off_gpu()
        self.optimizer.reload_offloaded_states()  # which orders the copy in after the copy out
        self._count_back(nbytes)

    @override
    def tensors(self) -> Iterator[torch.Tensor]:
        for bundle in self.states:
            for state in bundle.states:
                yield from state.handles()

    @override
    def _give_up_offload(self) -> None:
        """Do nothing: what upstream copied is not looked at again."""

    @override
    def _wait_reload(self) -> None:
        # Race: a second pass of the rerun loop, a skipped step, an early exit's checkpoint and the next step's copy
        # out would read states that have not landed. Upstream waits before the inner step alone.
        self._offloader.sync_before_step()

    def settle(self) -> None:
        """End the moves of a training step."""
        self.require_readable()


class Generation2(Member):
    """Drives it, in an optimizer that was built with `config.chunked_optimizer_state_offload=True`."""

    _is_out = False  # whether states were offloaded, and not reloaded since; upstream's own step finds them on the host

    name = "mcore generation 2"
    verbs = ("offload_optimizer_state_for_forward", "prefetch_optimizer_state_for_gradient_finalization")

    def __init__(self, source: MegatronSource, traffic: Traffic) -> None:
        super().__init__(source, traffic)
        config = self.optimizer.config
        # With MXFP8 and a shared gradient buffer the masters are read once more after grads are zeroed.
        self._masters_are_read_late = config.reuse_grad_buf_for_mxfp8_param_ag and config.overlap_param_gather
        selected = {id(param) for param in self._offloader.selected_params}
        self.planned_bytes = sum(bundle.nbytes for bundle in self.states if id(bundle.param) in selected)

    def host_buffers(self) -> list[Any]:
        """Return upstream's page-locked host tensors."""
        states = [buffer for by_key in self._offloader._cpu_state.values() for buffer in by_key.values()]
        return [*self._offloader._cpu_master.values(), *states]

    def offload(self) -> None:
        """Start the copies to the host."""
        self.optimizer.offload_optimizer_state_for_forward(offload_master=not self._masters_are_read_late)
        self._is_out = True

    def release(self) -> None:
        """Free the GPU memory, and count what is off the GPU."""
        if self._is_out:
            if self._masters_are_read_late:
                self.optimizer.offload_optimizer_state_for_forward()
            self._count_away()

    def reload(self) -> None:
        """Start the copies to the GPU, and count them."""
        if self._is_out:
            self._count_back(self._bytes_off_gpu())
            self.optimizer.prefetch_optimizer_state_for_gradient_finalization()
            self._is_out = False

    def require_readable(self) -> None:
        """Make the states readable for work that the current stream gets from now on."""
        self.settle()
        # Race: upstream binds the moments to host tensors as soon as their copies are enqueued, and only its
        # sharded state dict waits for them; another reader would see torn bytes.
        self._offloader._d2h_stream.synchronize()

    def require_writable(self) -> None:
        """Restore what is on its way: upstream's step and its loader bind the moments that they write themselves."""
        self.settle()

    def settle(self) -> None:
        """Restore the masters; upstream keeps the moments in host memory between updates."""
        self.optimizer.ensure_master_weights_for_param_sync()
        # Race: of the moments the first chunk was bound to GPU memory when its copy was enqueued, for an update that
        # did not come; upstream's own event is for the masters, which land before.
        torch.cuda.current_stream().wait_stream(self._offloader._h2d_stream)


MEMBERS: dict[str, type[Generation1 | Generation2]] = {each.name: each for each in (Generation1, Generation2)}


class McoreEngine(Engine):
    """The members of a rank, with every state on the GPU for the optimizer step.

    ValueError if mcore built no offloader, because the flag was set after the optimizer was made, or if an optimizer is
    of a kind for which mcore's offloader is not driven.
    """

    limits = "optimizer.optimizer_state_offload_fraction"

    def __init__(self, name: str, sources: Sequence[Source]) -> None:
        self.name, self.sources, self.traffic = name, list(sources), Traffic()
        self._members: dict[Source, Generation1 | Generation2] = {}
        for source in sources:
            if not isinstance(source, MegatronSource):
                raise ValueError(
                    "OffloadConfig.engine='mcore' with a Float16OptimizerWithFloat16Params: mcore's offloader is "
                    "driven under its DistributedOptimizer alone; use OffloadConfig(engine='native')"
                )
            if source.upstream_offloader() is None:
                raise ValueError(
                    "optimizer.offload_optimizer_states=True was set after the optimizer was built, so mcore gave it "
                    "no offloader: set it before, or use OffloadConfig(engine='native')"
                )
            self._members[source] = MEMBERS[name](source, self.traffic)
        self.state_bytes = sum(each.state_bytes for each in self._of())
        self.planned_bytes = sum(each.planned_bytes for each in self._of())

    def _of(self, source: Source | None = None) -> list[Generation1 | Generation2]:
        return list(self._members.values()) if source is None else [self._members[source]]

    @property
    @override
    def pinned_bytes(self) -> int:
        buffers = (buffer for member in self._of() for buffer in member.host_buffers())
        return sum(power_of_two_at_least(buffer.nbytes) for buffer in buffers)

    @override
    def existing_bytes(self) -> int:
        return sum(member.existing_bytes() for member in self._of())

    @override
    def begin_pass(self, is_like_others: bool = True) -> None:
        self.traffic.most_released = self.traffic.released
        for member in self._of():
            member.offload()

    @override
    def release(self) -> None:
        for member in self._of():
            member.release()

    @override
    def reload(self) -> None:
        for member in self._of():
            member.reload()

    @override
    def settle(self) -> None:
        for member in self._of():
            member.settle()

    @override
    def require_readable(self, source: Source | None = None, masters_only: bool = False) -> None:
        for member in self._of(source):
            member.require_readable()

    @override
    def require_writable(self, source: Source | None = None, masters_only: bool = False) -> None:
        for member in self._of(source):
            member.require_writable()

    @property
    @override
    def is_lost(self) -> bool:
        return any(member.interrupted for member in self._of())

    @override
    def close(self) -> None:
        self.require_writable()  # gives up generation 1's copies out
        self.require_readable()  # waits for generation 2's; upstream keeps its host buffers until the optimizer goes
        self._members.clear()
        self.sources = []
