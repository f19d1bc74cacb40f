"""The native engine: offload of one DistributedOptimizer's states, slab by slab."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engine.host_buffer import page_lock
from bridge_fgo.engine.host_memory import local_cpus, require_host_memory
from bridge_fgo.engine.inner_step import InnerStep
from bridge_fgo.engine.master_copy import MasterCopy
from bridge_fgo.engine.part import StepPart, TrackedSlab, Traffic, require_readable, send_off
from bridge_fgo.engine.part_layout import lay_out, offloaded_bundles, part_bytes, pipeline_bytes
from bridge_fgo.engine.remainders import MasterRemainders, SlabRemainders
from bridge_fgo.engine.residency import Residency
from bridge_fgo.engine.schedule import Schedule
from bridge_fgo.engine.slab import Slab
from bridge_fgo.engine.snapshot import Snapshot
from bridge_fgo.engine.states import Bundle, bundles, home_device

MARGIN_PARTS = 4
"""The least margin of the schedule, in parts; see `HoldPlanner.margin_bytes`."""

MARGIN_OF_STATES = 16
"""It is no more than a 16th of the states: of few bytes a part is a large share."""


class NativeOffloader:
    """See `bridge_fgo.engine.offloader.Offloader`.

    Host memory is planned, allocated and page-locked here, before training: the master weights exist, and
    the moments' sizes and dtypes are known before the first step makes them. Master weights and tensors of
    `optimizer.state` lie in slabs of their own, because the former go from the first step on and the latter
    as soon as they exist.

    Args:
        optimizer: a DistributedOptimizer that is not a stub, with Adam inside.
        config: what to offload.
        schedule: the order of moves, shared by the optimizers of the rank; to be made in the order in which
            they step.

    Raises:
        ValueError: the host has not the memory.
        RuntimeError: host memory could not be mapped or page-locked.
    """

    engine = "native"

    def __init__(self, optimizer: Any, config: OffloadConfig, schedule: Schedule) -> None:
        self._config = config
        self._schedule = schedule
        self._device = home_device(optimizer)
        self._traffic = Traffic()
        self.pin_seconds = 0.0
        everything = bundles(optimizer)
        self.state_bytes = sum(bundle.nbytes for bundle in everything)
        chosen = offloaded_bundles(everything, config)
        self.planned_bytes = sum(bundle.nbytes for bundle in chosen)
        self._together_bytes = pipeline_bytes(chosen)
        self._master_copy = MasterCopy(optimizer)
        weights = {} if config.master_remainders is False else self._master_copy.rounded_weights()
        packing = schedule.packing  # not the schedule itself, which would go only when Python looks for cycles
        self._remainders = MasterRemainders(
            weights, self._device, wanted=lambda: config.master_remainders or packing.packs
        )
        self.parts = self._make_parts(chosen)
        self._slabs = [slab for part in self.parts for slab in part.slabs]
        if config.pin_memory and self._device.type == "cuda":
            pinned = sum(part.nbytes for part in schedule.parts)
            require_host_memory(sum(slab.nbytes for slab in self._slabs), pinned)
            started = time.perf_counter()
            page_lock([slab.slab.host for slab in self._slabs], local_cpus(self._device))
            self.pin_seconds = time.perf_counter() - started
        if config.master_remainders is None and self._remainders.are_fast:
            for part in self.parts:
                part.packable_bytes = sum(slab.nbytes for slab in part.slabs if slab.slab.remainders is not None)
        schedule.parts += self.parts
        schedule.count_packable()
        self._owners = {i: part for part in self.parts for i in part.ids}
        self._inner_step = InnerStep(optimizer.optimizer)
        self._snapshot: Snapshot | None = None
        self._is_checked = False
        """Whether the weights have been compared for the optimizer step that comes next."""
        self._masters_lost = False
        """Whether masters were brought back though the weights had changed, and were not written since."""
        if not self._master_copy.divides():
            schedule.planner.masters_held_bytes += sum(slab.nbytes for slab in self._slabs if slab.is_copied_to_model)

    def _make_parts(self, chosen: list[Bundle]) -> list[StepPart]:
        target = part_bytes(chosen, self._config)
        planner = self._schedule.planner
        margin = min(MARGIN_PARTS * target, self.planned_bytes // MARGIN_OF_STATES)
        planner.margin_bytes = max(margin, planner.margin_bytes)
        parts = []
        for part in lay_out(chosen, target, self._remainders):
            slabs = []
            for of_part in part.slabs:
                slab = Slab(of_part.layout, of_part.refs, self._device, self._schedule.ledger, of_part.remainders)
                tracked = TrackedSlab(slab, of_part.is_copied_to_model, self._schedule.transfers, self._traffic)
                slabs.append(tracked)
            parts.append(StepPart([bundle.param for bundle in part.bundles], slabs))
        self._remainders.ready()
        return parts

    def _away(self) -> list[SlabRemainders]:
        """Return those of slabs whose masters are not on the GPU but in part."""
        return [
            slab.slab.remainders for slab in self._slabs if slab.slab.is_packed and slab.slab.remainders is not None
        ]

    def _require_unchanged(self) -> None:
        """See `MasterRemainders.require_unchanged`: for all masters that were copied in part."""
        if away := self._away():
            with self._schedule.transfers.computing():
                self._remainders.require_unchanged(away)

    @contextmanager
    def _trusted(self) -> Iterator[None]:
        """Check once that masters that were copied in part can be brought back, and trust in it inside the block.

        Raises:
            RuntimeError: see `MasterRemainders.require_unchanged`.
        """
        self._require_unchanged()
        with self._remainders.trusted():
            yield

    def require_restorable(self) -> None:
        """See `Offloader.require_restorable`."""
        self._require_masters("brought back")
        if not self._is_checked:
            self._require_unchanged()
            self._is_checked = True

    @property
    def is_lost(self) -> bool:
        """See `Offloader.is_lost`."""
        return any(slab.tracker.interrupted for slab in self._slabs)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host bytes; 0 where the states live on the CPU."""
        return sum(slab.slab.host.pinned_bytes for slab in self._slabs)

    def copied_for_a_save(self) -> list[int]:
        """See `Offloader.copied_for_a_save`."""
        return [ref.saved_nbytes for slab in self.slabs for ref in slab.refs]

    @property
    def bytes_out(self) -> int:
        """See `Offloader.bytes_out`."""
        return self._traffic.out

    @property
    def bytes_in(self) -> int:
        """See `Offloader.bytes_in`."""
        return self._traffic.back

    @property
    def released_bytes(self) -> int:
        """See `Offloader.released_bytes`."""
        return self._traffic.most_released

    @property
    def enqueue_seconds(self) -> float:
        """See `Offloader.enqueue_seconds`."""
        return self._traffic.seconds

    @property
    def slabs(self) -> list[Slab]:
        """The slabs, in the order in which they move."""
        return [slab.slab for slab in self._slabs]

    @property
    def residencies(self) -> list[Residency]:
        """The residency of each slab."""
        return [slab.tracker.state for slab in self._slabs]

    def has_states(self) -> bool:
        """Return whether any tensor of any slab exists."""
        return any(slab.exists() for slab in self.slabs)

    def offload(self) -> None:
        """Start the copies out of every slab whose tensors exist, but those that stay."""
        self._traffic.most_released = self._traffic.released
        self._remainders.look_up()
        self._is_checked = False
        leaving = [slab for part in self.parts if not part.stays for slab in part.slabs]
        coming = any(slab.tracker.state is Residency.RELOADING for slab in leaving)  # of a pass that is run again
        with self._trusted() if coming else nullcontext():
            send_off(leaving)
        self._schedule.begin_pass()

    def release(self) -> None:
        """Free the GPU memory of slabs that are on their way out, as far as the schedule has no room for them."""
        self._schedule.release()

    def reload(self) -> None:
        """Start the copies in, as far as the schedule has room for them."""
        self._schedule.reload()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """See `Offloader.stepping`: the inner optimizer steps part by part, as the states come and go."""
        if not self._inner_step.divides():
            self.require_writable()
            yield
            return
        # Part by part the copy to the model's weights hides behind the copies of the parts that follow, and the
        # masters may leave at once.
        by_part = self._master_copy.divides()

        def update(part: StepPart) -> None:
            self._inner_step.update(part)
            if by_part and part.has_masters:
                self._master_copy.copy_part(part.ids)
                for slab in part.slabs:
                    if part.stays:
                        slab.slab.drop_packed()
                    else:
                        slab.slab.is_rounded = slab.is_copied_to_model

        def step() -> None:
            self._inner_step.update(None)  # parameters whose states are not offloaded
            self._remainders.is_stepping = by_part
            try:
                self._schedule.step(self.parts, update, hold_masters=not by_part, together_bytes=self._together_bytes)
            finally:
                self._remainders.is_stepping = False

        self.require_restorable()
        self._is_checked = False
        with self._remainders.trusted(), self._inner_step.replaced(step, self._owners), self._master_copy.session():
            yield

    def copy_masters(self, copy: Callable[[], Any]) -> Any:
        """See `Offloader.copy_masters`."""
        if self._master_copy.copying_part:
            return copy()
        left = [
            slab
            for part in self.parts
            for slab in part.slabs
            if slab.is_copied_to_model and not part.ids <= self._master_copy.copied
        ]
        require_readable(left)
        with self._master_copy.only_the_rest():
            return copy()

    @contextmanager
    def saving(self, copies: bool) -> Iterator[None]:
        """See `Offloader.saving`: nothing moves."""
        self._snapshot = Snapshot(self._owners, self._schedule.transfers, copies)
        try:
            with self._trusted(), self._snapshot.session():
                yield
        finally:
            self._snapshot = None

    def require_whole(self, what: str) -> None:
        """See `Offloader.require_whole`."""
        self._require_masters(what)
        self._schedule.require_whole(what)

    def _require_masters(self, what: str) -> None:
        if self._masters_lost:
            raise RuntimeError(
                f"the optimizer state cannot be {what}: weights of the model were changed while their master weights "
                "were offloaded in part (OffloadConfig.master_remainders), and what was to write the masters anew "
                "has failed; load a checkpoint, or call reload_model_params()"
            )

    @property
    def is_saving(self) -> bool:
        """See `Offloader.is_saving`."""
        return self._snapshot is not None

    def hand_out(self, param: torch.Tensor, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """See `Offloader.hand_out`."""
        if self._snapshot is not None:
            return self._snapshot.hand_out(param, read)
        part = self._owners.get(id(param))
        if part is not None:
            require_readable(part.slabs)
        return read()

    def require_readable(self, masters_only: bool = False) -> None:
        """See `Offloader.require_readable`."""
        self._is_checked = False  # where memory runs out on the way, a later step has to compare the weights anew
        with self._trusted():
            require_readable([slab for slab in self._slabs if slab.is_copied_to_model or not masters_only])

    @contextmanager
    def overwriting_masters(self) -> Iterator[None]:
        """See `Offloader.overwriting_masters`. Where it fails, and the masters were not right before, they are lost."""
        if away := self._away():
            with self._schedule.transfers.computing():
                self._masters_lost = self._masters_lost or not self._remainders.are_unchanged(away)
        with self._remainders.trusted():
            self.require_writable()
        yield
        self._masters_lost = False

    def require_writable(self, masters_only: bool = False) -> None:
        """See `Offloader.require_writable`."""
        self.require_readable(masters_only)
        for slab in self._slabs:
            if slab.is_copied_to_model or not masters_only:
                slab.tracker.require_writable()

    def settle(self) -> None:
        """See `Offloader.settle`; what is released stays so, and comes back when somebody asks for it."""
        coming = [slab for slab in self._slabs if slab.tracker.state is Residency.RELOADING]
        if coming:
            with self._trusted():
                for slab in coming:
                    slab.tracker.require_readable()

    def states_replaced(self) -> None:
        """See `Offloader.states_replaced`; the next offload takes the new tensors into the slabs."""
        for slab in self._slabs:
            if slab.tracker.state is Residency.RESIDENT:
                self._schedule.transfers.wait_out(slab.slab)
                slab.slab.drop_if_left()

    def resident_note(self) -> str:
        """See `Offloader.resident_note`."""
        left = self.state_bytes - self.planned_bytes
        if left == 0:
            return ""
        reasons = [
            f"OffloadConfig.{name}"
            for name, asked in (
                ("fraction", self._config.fraction < 1.0),
                ("moments", not self._config.moments),
                ("master_weights", not self._config.master_weights),
            )
            if asked
        ]
        return f"{left / 2**30:.2f} GiB of state by {', '.join(reasons)}"

    def close(self) -> None:
        """See `Offloader.close`.

        Raises:
            RuntimeError: masters are lost, see `overwriting_masters`, or cannot be brought back.
        """
        self._require_masters("kept")
        self.require_writable()
        self._schedule.remove(self.parts)
        for slab in self._slabs:
            slab.slab.close()
