"""Optimizer state: which optimizers have some that can move, and the moves of all slabs of the native engine."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.engine import ATTACHED, Attachment, attachment_of
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.engines.ranks import gather, on_every_rank, pin_on_every_rank
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.memory.slab import MOST_IN_TRANSIT, Slab, SlabState
from bridge_fgo.memory.state import WeightShard
from bridge_fgo.sleep.checkpoint_workers import let_go_for, stop_for
from bridge_fgo.sleep.host_copies import HostCopies
from bridge_fgo.sleep.moved import RETURNED_BYTES, return_to_driver
from bridge_fgo.states.choice import leaves, source_of
from bridge_fgo.states.distributed import McoreSource, MegatronSource, is_adam
from bridge_fgo.states.float16 import is_muon

STATES = "_bridge_fgo_states"
"""Attribute of an optimizer of mcore's that holds the `OptimizerStates` whose engine is its own."""

WHOLE_MASTERS = OffloadConfig(engine="native", master_remainders=False)
"""Whole masters round to the weights, so that these need not be copied."""


ASLEEP = "call Residency.reload('optimizer') first, or save and load checkpoints in Residency.checkpointing()"
"""What to do where states are touched that a `Residency` has offloaded, and that nothing serves."""


class OptimizerStates:
    """The states of a top-level optimizer on this rank, and the engine that moves them: an attached one, or its own.

    Args:
        optimizer: what the training loop steps: a ChainedOptimizer, or an optimizer as `movable_optimizers` has them.
        config: for an engine of its own; `WHOLE_MASTERS` when None.
        alone: whether other ranks may not make theirs now, and are not asked.

    Raises:
        ValueError: an optimizer cannot be offloaded, on this rank or another; names it.
        RuntimeError: host memory could not be had, on this rank or another.
    """

    def __init__(self, optimizer: Any, config: OffloadConfig | None = None, alone: bool = False) -> None:
        self.config = config or WHOLE_MASTERS
        self.meter = PeakMeter()
        together: Callable[[Callable[[], Any]], Any] = (lambda act: act()) if alone else on_every_rank
        self.optimizers = together(lambda: movable_optimizers(optimizer))
        attached = together(lambda: attached_engine(self.optimizers, config))
        # The same on all ranks: one whose optimizers are all stubs has none to be attached.
        self.is_owner = attached is None if alone else not any(gather(attached is not None))
        """Whether the engine serves nobody else, so that the optimizer's own methods know nothing of it."""
        self.sources = [source_of(leaf) for leaf in self.optimizers]
        if attached is None:
            if self.is_owner:
                attached = together(lambda: NativeEngine(self.sources, self.config, self.meter))
            else:
                attached = NativeEngine([], WHOLE_MASTERS, self.meter)
        self.engine = attached
        if not self.is_owner:
            own = {id(leaf) for leaf in self.optimizers}
            found = [source for source in attached.sources if isinstance(source, McoreSource)]
            self.sources = [source for source in found if id(source.optimizer) in own]
        elif alone:
            self.engine.pin()
        else:
            pin_on_every_rank(self.engine)
        self.may_be_unchanged = True
        """Whether states may be as they were reloaded; whoever steps them sets it to False."""
        self._copies: HostCopies | None = None
        """None where others move the slabs too, or where the host's copies are overwritten (debug mode)."""
        self._offloading = deque[Slab]()
        """Slabs whose copies out were started, and whose memory is still to be released."""
        self._cached = 0
        """Bytes of released slabs that the allocator has and the driver has not."""
        self.is_driven = False
        """Whether training steps drive an engine of its own too, which then stays attached."""
        self._serves = 0
        together(lambda: self._finish(refuses=not alone))
        if self.is_owner:
            for leaf in self.optimizers:
                setattr(leaf, STATES, self)

    def _finish(self, refuses: bool) -> None:
        let_go_for(self)
        if self.is_owner and self.sources and self.engine.schedule.transfers.keeps_host_copies:
            self._copies = HostCopies(self.engine.slabs, self.sources[0].device)
        if self.is_owner and refuses:
            owner = weakref.ref(self)
            self.engine.traffic.touches.refusals.append(
                lambda: "" if (states := owner()) is None or states.is_served else ASLEEP
            )

    @property
    def reads_weights(self) -> bool:
        """Whether masters may be packed, which takes the weights to offload and to reload them."""
        return any(slab.codec.family is not None for slab in self.engine.slabs)

    @property
    def is_served(self) -> bool:
        """Whether installed patches bring states to whoever reads or steps the optimizer."""
        return not self.is_owner or self.is_driven or self._serves > 0

    @property
    def is_away(self) -> bool:
        """Whether any of it is not on the GPU, whoever has offloaded it."""
        return any(slab.state in (SlabState.RELEASED, SlabState.RELOADING) for slab in self.engine.slabs)

    @property
    def is_here(self) -> bool:
        """Whether any of it is on the GPU."""
        return any(slab.state is not SlabState.RELEASED and slab.exists() for slab in self.engine.slabs)

    @property
    def unmade_bytes(self) -> int:
        """Bytes of states that no step has made yet, in slabs that were never offloaded, which have room for them."""
        new = (slab for slab in self.engine.slabs if slab.gpu is None and slab.exists())
        return sum(state.nbytes for slab in new for state in slab.states if state.read() is None)

    @property
    def released_bytes(self) -> int:
        """The bytes of masters and moments whose GPU memory is released: a count, as each tensor's would take long."""
        return self.engine.traffic.released

    def require_whole(self) -> None:
        """Raise RuntimeError where an error has ended an optimizer step, or a move, half-way."""
        for source in self.sources:
            self.engine.require_whole(source, "offloaded")
        for slab in self.engine.slabs:
            _ = slab.state  # raises

    def start_offload(self) -> int:
        """Start to copy to the host what has changed, and release what has not; return the bytes. Then `end_offload`.

        Packed masters read their weights as long as the GPU is behind.
        """
        before = self.engine.traffic.out
        if self.is_owner and not self.is_driven:
            self.give_up_offload()  # an interrupted call may have left copies, which lack later updates
        self.engine.masters.locate_weights()  # they may have been reloaded to another address
        unchanged = set[Slab]()
        if self._copies is not None:
            if self.may_be_unchanged and not self.is_driven:  # steps by parts copy too
                unchanged = self._copies.unchanged()
            self._copies.forget()  # until the reload: an attached engine may copy out again
        self._offloading.clear()
        self._cached = 0
        for slab in self.engine.slabs:
            if slab in unchanged:
                slab.release_unchanged()
            elif slab.exists() and slab.state is not SlabState.RELEASED:
                is_new = slab.gpu is None
                slab.offload()
                self._offloading.append(slab)
                # To pack a slab, or to move tensors into it the first time, takes more memory: few at a time.
                while (is_new or slab.is_encoded) and len(self._offloading) >= MOST_IN_TRANSIT:
                    self._release_first()
        return self.engine.traffic.out - before

    def end_offload(self) -> None:
        """Release all slabs, on the engine's training stream; the driver gets most of their memory meanwhile."""
        while self._offloading:
            self._release_first()

    def _release_first(self) -> None:
        gone = self._offloading.popleft()
        gone.release()
        self._cached += gone.nbytes
        if self._cached >= RETURNED_BYTES:
            gone.transfers.await_released()
            return_to_driver(self.sources[0].device)
            self._cached = 0

    def give_up_offload(self) -> None:
        """Keep every slab that was not released, after something failed between the two.

        Training may go on and write it, which its copy would lack.
        """
        self._offloading.clear()
        for slab in self.engine.slabs:
            if not slab.interrupted and slab.state is SlabState.OFFLOADING:
                slab.require_writable()

    def reload(self) -> int:
        """Reload all of it, for work that the current stream gets from now on; return the bytes. Then `finish_reload`.

        Raises:
            torch.OutOfMemoryError: there is no memory for all; the rest is still away, and it may be called again.
            RuntimeError: as `Engine.require_writable`.
        """
        before = self.engine.traffic.back
        if self._copies is not None and not self.is_driven and not self.reads_weights:
            self._copies.reload_all()
        self.engine.require_writable()
        self.may_be_unchanged = True
        self._detach()
        return self.engine.traffic.back - before

    def finish_reload(self) -> None:
        """Note what `reload` has brought, so that what does not change need not be copied; the host waits for it."""
        if self._copies is not None:
            self._copies.finish_reload()

    def attach(self) -> None:
        """Have installed patches serve whoever reads or steps the optimizer, until `reload`."""
        for source in self.sources if self.is_owner else ():
            setattr(source.optimizer, ATTACHED, Attachment(self.engine, source))

    def _detach(self) -> None:
        if self.is_owner and not (self.is_driven or self._serves):
            for leaf in self.optimizers:
                vars(leaf).pop(ATTACHED, None)

    def drive(self) -> None:
        """Stay attached from now on: training steps drive the engine, until `stop_driving` or `close`."""
        self.attach()
        self.is_driven = True
        self.may_be_unchanged = False

    def stop_driving(self) -> None:
        """Make the states resident, and be attached no more; the engine stays.

        Raises:
            torch.OutOfMemoryError, RuntimeError: as `reload`; it stays attached then.
        """
        self.engine.require_writable()
        self.is_driven = False
        if self._copies is not None:
            self._copies.forget()
        self._detach()

    @contextmanager
    def served(self) -> Iterator[None]:
        """Context in which installed patches serve what reads or loads states, from the host where they are away."""
        was_attached = all(attachment_of(leaf) is not None for leaf in self.optimizers)
        self.attach()
        self._serves += 1
        try:
            yield
        finally:
            self._serves -= 1
            if not was_attached:
                self._detach()

    # Weights that masters round to.

    def rounded_masters(self) -> list[tuple[MegatronSource, torch.Tensor, WeightShard]]:
        """Return a DistributedOptimizer's masters that are copied whole: source, master, and weights it rounds to."""
        if self.reads_weights:
            return []
        found = [source for source in self.sources if isinstance(source, MegatronSource)]
        return [(source, *pair) for source in found for pair in source.rounded_masters()]

    def round_again(self, source: MegatronSource, masters: Sequence[torch.Tensor]) -> int:
        """Write the weights that some masters of a source round to; return the bytes that crossed.

        Slabs of masters that are away are reloaded one at a time and released at once: nothing has written them.
        """
        before = self.engine.traffic.back + self.engine.traffic.out
        wanted = {id(master) for master in masters}
        for slab in self.engine.slabs:
            of_slab = [m for state in slab.states if (m := state.read()) is not None and id(m) in wanted]
            if not of_slab or slab.state is SlabState.RESIDENT:
                continue
            wanted -= {id(master) for master in of_slab}
            slab.require_readable()
            source.round_again(of_slab)
            slab.release_unchanged()
        source.round_again([master for master in masters if id(master) in wanted])
        return self.engine.traffic.back + self.engine.traffic.out - before

    def close(self) -> None:
        """Make the states resident, and close an engine of its own.

        Raises:
            RuntimeError: as `Engine.close`.
        """
        stop_for(self)
        if self.is_owner:
            self.engine.close()
            self._copies = None
            self.is_driven = False
            self._detach()
            for leaf in self.optimizers:
                vars(leaf).pop(STATES, None)


# Which optimizers.


def movable_optimizers(optimizer: Any) -> list[Any]:
    """Return mcore's optimizers with states under an optimizer; stubs are skipped.

    DistributedOptimizers over Adam, and Float16OptimizerWithFloat16Params over Adam or Muon.

    Raises:
        ValueError: there is another kind of optimizer among them, or something else.
    """
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    found = []
    for leaf in leaves(optimizer) if hasattr(optimizer, "__dict__") else [optimizer]:
        if not isinstance(leaf, MegatronOptimizer):
            raise ValueError(
                f"Residency(optimizer={type(leaf).__name__}): pass mcore's optimizer, which get_megatron_optimizer "
                "returned and the training loop steps, or optimizer=None to move parameters and gradients alone"
            )
        if getattr(leaf, "is_stub_optimizer", False):
            continue
        if why := refusal_of(leaf):
            inner = type(getattr(leaf, "optimizer", None)).__name__
            raise ValueError(
                f"Residency cannot offload the state of a {type(leaf).__name__} over a {inner}: {why}, or pass "
                "optimizer=None to move parameters and gradients alone"
            )
        found.append(leaf)
    return found


def refusal_of(leaf: Any) -> str:
    """Return why the states of an optimizer cannot be moved, and what to change; empty where they can be."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    inner = getattr(leaf, "optimizer", None)
    is_distributed = isinstance(leaf, DistributedOptimizer)
    if not is_distributed and not isinstance(leaf, Float16OptimizerWithFloat16Params):
        return "set optimizer.use_distributed_optimizer=True"
    if getattr(getattr(leaf, "ddp_config", None), "use_megatron_fsdp", False):
        return "Megatron-FSDP manages its states itself: set ddp.use_megatron_fsdp=False"
    if type(inner).__name__ == "HybridDeviceOptimizer":
        return "it keeps states on the CPU already: set optimizer.optimizer_cpu_offload=False"
    if getattr(inner, "capturable", False) or getattr(leaf.config, "optimizer_cuda_graph", False):
        return "its CUDA graph has the states' addresses baked in: set optimizer.optimizer_cuda_graph=False"
    name = getattr(leaf.config, "optimizer", "adam")
    if name != "adam" if is_distributed else not (is_adam(inner) or is_muon(inner)):
        return f"optimizer.optimizer={name!r}: set optimizer.optimizer='adam'"
    return ""


def attached_engine(optimizers: Sequence[Any], config: OffloadConfig | None) -> NativeEngine | None:
    """Return the engine that is attached to the optimizers of this rank, if one is.

    Raises:
        ValueError: it is of another kind, or there are several, or settings do not reach it, or it is yet to come.
    """
    engines = {id(to.engine): to.engine for leaf in optimizers if (to := attachment_of(leaf)) is not None}
    if not engines:
        for leaf in optimizers:
            if STATES in vars(leaf):
                raise ValueError(
                    "the optimizer has a Residency already, or mcore's offload_to_cpu has moved it: make one "
                    "Residency, before the first sleep, and close() it before the next"
                )
            if getattr(leaf.config, "offload_optimizer_states", False):
                raise ValueError(
                    "optimizer.offload_optimizer_states=True, but no engine is attached to the optimizer: in a loop of "
                    "your own unset the flag and use `res.training_step()` of this Residency; in Bridge's call "
                    "bridge_fgo.install() before its setup, and make Residency after it"
                )
        return None
    if len(engines) > 1 or any(attachment_of(leaf) is None for leaf in optimizers):
        raise ValueError("the optimizers under one Residency have several engines: make one Residency for each")
    (engine,) = engines.values()
    if not isinstance(engine, NativeEngine):
        raise ValueError(
            f"Residency cannot offload optimizer state that engine {engine.name!r} moves: use "
            "OffloadConfig(engine='native')"
        )
    if config is not None:
        raise ValueError(
            f"Residency(config={config!r}): the engine that is attached to the optimizer has settings of its own; "
            "leave config out, and give the settings to bridge_fgo.install"
        )
    return engine
