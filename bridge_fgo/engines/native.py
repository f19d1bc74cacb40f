"""The native engine: offload of all sources of a rank, slab by slab, in one schedule."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, override

import torch

from bridge_fgo.config import OffloadConfig, readable
from bridge_fgo.engines.checkpoints import CheckpointingEngine
from bridge_fgo.engines.offloaded_source import OffloadedSource
from bridge_fgo.engines.packed_masters import PackedMasters
from bridge_fgo.memory.auto_budget import AutoBudget
from bridge_fgo.memory.guard import own
from bridge_fgo.memory.host_buffer import HostBuffer, page_lock
from bridge_fgo.memory.layout import copied_whole
from bridge_fgo.memory.meters import PeakMeter, Traffic, block_rounding
from bridge_fgo.memory.remainders import Remainders
from bridge_fgo.memory.slab import Slab, SlabState, require_readable, send_off
from bridge_fgo.memory.slab_file import SlabFile, parts_in_file
from bridge_fgo.memory.transfers import CudaTransfers, Transfers
from bridge_fgo.offload.advice import Advice
from bridge_fgo.offload.profile import Mark
from bridge_fgo.offload.schedule import Schedule
from bridge_fgo.states.source import Source


class NativeEngine(CheckpointingEngine):
    """Keeps states in exact pinned host memory, and moves them by the plan of a `Schedule`.

    Host memory is planned and mapped here and page-locked by `pin`, before training: what exists is known, and so are
    the sizes and dtypes of what the first step makes. ValueError for a budget if GPU memory cannot be measured.

    It takes at most `host_bytes` of host memory: states that do not fit stay on the GPU (`unhosted_bytes`), or are in
    a file (`file`) in `OffloadConfig.nvme_folder`.
    """

    name = "native"
    watches_points = True

    def __init__(
        self,
        sources: Sequence[Source],
        config: OffloadConfig,
        meter: PeakMeter,
        transfers: Transfers | None = None,
        host_bytes: float = math.inf,
    ) -> None:
        super().__init__()
        budget = config.gpu_memory_budget_gib
        if budget is not None and not meter.works:
            raise ValueError(
                f"OffloadConfig.gpu_memory_budget_gib={budget!r} needs a GPU, whose memory it measures: leave it "
                "unset, or set OffloadConfig.fraction"
            )
        self.sources, self.traffic = list(sources), Traffic()
        self.config = config
        device = sources[0].device if sources else torch.device("cpu")
        self.transfers = transfers = transfers or make_transfers(device, config)
        in_capture = "a CUDA graph is being captured: call bridge_fgo.reload_states() before"
        self.traffic.touches.refusals.append(lambda: in_capture if transfers.capturing() else "")
        self.schedule = schedule = Schedule(
            transfers, meter, config.gpu_memory_budget_bytes, AutoBudget(meter) if budget == "auto" else None
        )
        schedule.ledger.block_bytes = block_rounding(device)
        remainders = Remainders(device)
        codec_of = remainders.codec_of if config.master_remainders else copied_whole
        make_slab = partial(Slab, device=device, transfers=transfers, ledger=schedule.ledger, traffic=self.traffic)
        offloaded: list[OffloadedSource] = []
        self.host_room = host_bytes
        for source in sources:
            room = self.host_room if config.nvme_folder is None else math.inf
            offloaded.append(OffloadedSource(source, config, codec_of, make_slab, room))
            self.host_room -= sum(slab.nbytes for slab in offloaded[-1].slabs)
        self._offloaded = dict(zip(self.sources, offloaded, strict=True))
        schedule.parts += [part for each in offloaded for part in each.parts]
        self.file: SlabFile | None = None
        if config.nvme_folder is not None and self.host_room < 0:
            self._put_in_file(config.nvme_folder, host_bytes)
        self.state_bytes = sum(each.state_bytes for each in offloaded)
        self.planned_bytes = sum(each.planned_bytes for each in offloaded)
        self.unhosted_bytes = sum(each.unhosted_bytes for each in offloaded)
        asked = {"fraction": config.fraction, "moments": config.moments, "master_weights": config.master_weights}
        asked["host_memory_gib"] = not self.unhosted_bytes
        self.limits = ", ".join(f"OffloadConfig.{name}" for name, part in asked.items() if part < 1)
        schedule.holding.margin_bytes = max((each.margin_bytes for each in offloaded), default=0)
        schedule.holding.held_through_step = sum(each.held_through_step for each in offloaded)
        remainders.ready()
        self.masters = PackedMasters(remainders, self._offloaded, transfers)
        self.hosts_beside: list[HostBuffer] = []  # those of gradients, page-locked together with the states'
        self._advice = Advice(transfers, meter)
        self.copies_all = config.survive_crash  # whether the host gets what stays on the GPU too
        self._advises = config.fraction == 1 and budget != "auto"
        self._pins = config.pin_memory and device.type == "cuda"
        self._counted_whole: set[Source] = set()  # those whose undivided step the plans count
        self._stepped: set[Source] | None = None  # that have ended their step in this training step; None before one

    def _put_in_file(self, folder: str, host_bytes: float) -> None:
        """Have a file in place of host memory for the slabs of some parts."""
        parts = self.schedule.parts
        for place in parts_in_file([[slab.nbytes for slab in part.slabs] for part in parts], host_bytes, self.config):
            parts[place].in_file = True
        slabs = [slab for part in parts if part.in_file for slab in part.slabs]
        self.file = SlabFile(folder, [slab.nbytes for slab in slabs], self.traffic)
        for slab in slabs:
            slab.host = self.file.buffer(slab.nbytes)
        self.host_room = host_bytes - self.host_bytes

    @property
    def slabs(self) -> list[Slab]:
        """All slabs, in the order in which they move."""
        return [slab for part in self.schedule.parts for slab in part.slabs]

    def _slabs_of(self, source: Source | None, masters_only: bool = False) -> list[Slab]:
        slabs = self.slabs if source is None else self._offloaded[source].slabs
        return [slab for slab in slabs if slab.written_back] if masters_only else slabs

    @property
    @override
    def bytes_to_pin(self) -> int:
        return sum(host.untouched_bytes for host in self._hosts_to_pin)

    @property
    def _hosts_to_pin(self) -> list[HostBuffer]:
        return [*self._hosts, *self.hosts_beside] if self._pins else []

    @property
    def _hosts(self) -> list[HostBuffer]:
        hosts = [host for slab in self.slabs for host in slab.hosts if not host.in_file]
        return hosts if self.file is None else [*hosts, *self.file.memory]

    @override
    def pin(self) -> None:
        if hosts := self._hosts_to_pin:
            started = time.perf_counter()
            page_lock(hosts)
            self.pin_seconds = time.perf_counter() - started
        for host in self.hosts_beside:
            host.is_to_lock = False  # by a Residency either, with pin_memory=False
        self.hosts_beside = []
        if self.file is not None:
            self.file.probe()

    # Figures.

    @property
    @override
    def pinned_bytes(self) -> int:
        return sum(host.pinned_bytes for host in self._hosts)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for the slabs, page-locked or not, with all buffers that take turns."""
        return sum(host.tensor.numel() for host in self._hosts)

    def file_note(self) -> str:
        """Return what is in files, and the time to read it and then to write it, for a line."""
        if (file := self.file) is None:
            return f"nothing in {self.config.nvme_folder}, as it fits"
        (read, written), seconds = (rate / 1e9 for rate in file.rates), sum(file.nbytes / rate for rate in file.rates)
        return (
            f"{readable(file.nbytes)} in a file in {file.folder} (read at {read:.1f} GB/s, written at {written:.1f}, "
            f"while all ranks of the node do; a step may wait {seconds:.1f} s to read and write it)"
        )

    @property
    @override
    def planned_peak_bytes(self) -> int | None:
        return self.schedule.holding.limit if self.schedule.is_planned else None

    @property
    @override
    def failed_fetches(self) -> int:
        return self.schedule.queue.failed_fetches

    @override
    def existing_bytes(self) -> int:
        return sum(state.nbytes for slab in self.slabs for state in slab.states if state.read() is not None)

    def _count_whole_steps(self) -> None:
        """Count all states of the sources whose step is not divided in plans; measure anew if these have changed."""
        whole = {source for source in self._offloaded if self.steps_whole(source)}
        if whole == self._counted_whole:
            return
        holding = self.schedule.holding
        for source in whole ^ self._counted_whole:
            more = self._offloaded[source].extra_bytes_if_undivided
            holding.held_through_step += more if source in whole else -more
        self._counted_whole = whole
        holding.forget()

    @property
    @override
    def is_lost(self) -> bool:
        return any(slab.interrupted for slab in self.slabs)

    # A training step.

    @contextmanager
    @override
    def training_step(self, kind: object) -> Iterator[None]:
        self.schedule.kind = kind
        self._stepped = None
        try:
            with self._advice.training_step(self.schedule.is_planned):
                yield
            if self._stepped is not None:
                self.is_torn = False
        finally:
            self._stepped = None

    @override
    def begin_pass(self, is_like_others: bool = True) -> None:
        self._count_whole_steps()
        self.traffic.most_released = self.traffic.released
        self.masters.remainders.locate()
        self.masters.begin_pass()
        # If a pass is run again, some are being reloaded.
        coming = [source for source, each in self._offloaded.items() if each.reloading]
        with self.masters.verified(*coming) if coming else nullcontext():
            moving = [s for each in self._offloaded.values() for s in (each.slabs if self.copies_all else each.moving)]
            moving = [slab for slab in moving if not slab.host.in_file]  # the schedule knows when the disk has room
            self._advice.time_copies(moving, send_off)
        self.schedule.begin_pass(is_like_others)

    @override
    def release(self) -> None:
        self.schedule.release()

    @override
    def point(self, mark: Mark) -> bool:
        if self.schedule.transfers.capturing():
            return False
        self.schedule.point(mark)
        return True

    @property
    @override
    def awaits_ranks(self) -> bool:
        return self.schedule.holding.awaits_ranks

    @override
    def reload(self) -> None:
        self.schedule.reload()

    @override
    def updating(self) -> None:
        if self._stepped is None:
            self._require_untorn("updated")
            self._require_loaded(self.sources, "updated")
            if self.file is not None:
                self.file.raise_error()
            self.masters.require_restorable(self.sources)  # of all sources, before the first of them is updated
            self._stepped = set()

    @contextmanager
    @override
    def stepping(self, source: Source) -> Iterator[None]:
        offloaded = self._offloaded[source]

        def run() -> None:
            keep_masters, in_order = not source.writes_back_by_part, source.keeps_order
            if not in_order:
                source.step(None)  # parameters whose states are not offloaded
            self.schedule.step(offloaded.parts, source.step, keep_masters, offloaded.group_bytes, in_order)
            if in_order:
                source.step(None)  # mostly the last: `select` takes the first parameters

        with ExitStack() as stack:
            if self.steps_whole(source):
                self.require_writable(source)
            else:
                self.masters.require_restorable([source])
                self.masters.check_anew([source])
                stack.enter_context(self.masters.trusted(source))
                # One launch for all parameters takes the host less time than one for each part, and needs all states.
                all_stay = not offloaded.moving and all(slab.state is SlabState.RESIDENT for slab in offloaded.slabs)
                if not (source.updates_in_place and all_stay):
                    stack.enter_context(source.stepping(run, offloaded.owners))
            if self._stepped is not None:
                self._stepped.discard(source)
                self.is_torn = True
            yield
        if self._stepped is not None:
            self._stepped.add(source)
            # Once each of a chain has stepped, an error, in the scheduler say, leaves states that are whole.
            self.is_torn = not self._stepped >= set(self.sources)

    def write_back(self, source: Source, copy: Callable[[], Any]) -> Any:
        """Call `copy`, which copies masters to the model's weights, with all masters readable that it reads."""
        with source.writing_back() as written:
            if written is not None:
                left = [part for part in self._offloaded[source].parts if not part.ids <= written]
                require_readable(slab for part in left for slab in part.slabs if slab.written_back)
            with own():  # masters that are being offloaded are read, not touched: their copies go on
                return copy()

    @override
    def settle(self) -> None:
        """End the step's moves; released slabs stay so, until they are used."""
        for source, offloaded in self._offloaded.items():
            if coming := offloaded.reloading:
                with self.masters.verified(source):
                    require_readable(coming)

    @override
    def end_step(self, updated: bool) -> None:
        self.schedule.end_step(updated)
        if self._advises and (line := self._advice.line(self.schedule.holding.limit)):
            self.schedule.holding.announce(line)

    # Readers and writers.

    @override
    def require_readable(self, source: Source | None = None, masters_only: bool = False) -> None:
        sources = self.sources if source is None else [source]
        self.masters.check_anew(sources)  # if memory runs out on the way, a later step compares once more
        with self.masters.verified(*sources):
            require_readable(self._slabs_of(source, masters_only))

    @override
    def require_writable(self, source: Source | None = None, masters_only: bool = False) -> None:
        self.require_readable(source, masters_only)
        for slab in self._slabs_of(source, masters_only):
            slab.require_writable()

    @override
    def offload_now(self, whole: bool = False) -> None:
        with self.masters.copied_whole() if whole else nullcontext():
            self.schedule.release_everything()

    def copied_for_a_save(self) -> list[int]:
        """Return the bytes, at most, of each host tensor that a checkpoint gets of the states."""
        return [state.saved_nbytes for slab in self.slabs for state in slab.states]

    @override
    def close(self) -> None:
        self.masters.require_restorable(self.sources)
        with self.masters.trusted(*self.sources):
            self.require_writable()
        for slab in self.slabs:
            slab.close()
        if self.file is not None:
            self.file.close()
        self.schedule.forget_parts()
        self._offloaded.clear()
        self.sources = []


def make_transfers(device: torch.device, config: OffloadConfig) -> Transfers:
    """Return the transfers for states on `device`."""
    return CudaTransfers(device, config.piece_bytes) if device.type == "cuda" else Transfers()
