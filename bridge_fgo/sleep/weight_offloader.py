"""The weights of a model on this rank: what is copied as they are offloaded, and how they are made whole on reload.

They move in slabs, of one storage each: this rank's shard of a DDP buffer, or a weight with a storage of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, override

import torch

from bridge_fgo.engines.ranks import on_every_rank
from bridge_fgo.memory.digest import byte_sums, digest_kernel
from bridge_fgo.memory.guard import class_of
from bridge_fgo.memory.storage_slab import Named, Range, StorageSlab
from bridge_fgo.memory.undo import undo_on_error
from bridge_fgo.sleep.checkpoint_workers import let_go_for, stop_for
from bridge_fgo.sleep.moved import RETURNED_BYTES, Kind, SideStream, Tally, return_to_driver, wait_for_gpu
from bridge_fgo.sleep.quantized import ColumnwiseCopies
from bridge_fgo.sleep.refusals import PLAIN
from bridge_fgo.sleep.rounding import Rounding, rounding_of
from bridge_fgo.sleep.state_offloader import StateOffloader

RELOADED_BY = "Residency.reload('params')"

NamedParam = tuple[str, torch.nn.Parameter]  # as `named_parameters` of its model chunk has it

Where = Callable[[str, torch.nn.Parameter], bool]
"""Whether a parameter is to move, by its name and what can be read while it is away: shape, dtype, `requires_grad`."""

Sums = tuple[int, ...]  # the sums over the bytes of each range that a slab copies


class HostParam(NamedTuple):
    """A parameter whose memory is away, as the host has it: this rank's shard, or all of it."""

    name: str  # as `named_parameters` of its model chunk has it
    param: torch.nn.Parameter  # its shape and dtype may be read
    first: int  # the place in the flat parameter at which `values` begin
    values: torch.Tensor  # on the host, [n], of the parameter's dtype


class WeightSlab(StorageSlab):
    """Weights in one storage, which move together, and what they are reloaded from.

    Args:
        tensor, name, ranges, named: as for `StorageSlab`; the ranges are what this rank copies.
        params: the parameters that lie there.
        buffer: mcore's `_ParamAndGradBuffer`, whose parameters these are; None if they are in none.
        place: the same on all ranks of the gather, and for no other slab of theirs; None if this rank gathers alone.
    """

    kind: Kind = "params"

    def __init__(
        self,
        tensor: torch.Tensor,
        name: str,
        ranges: Sequence[Range] | None = None,
        named: Iterable[Named] = (),
        params: Sequence[NamedParam] = (),
        buffer: Any = None,
        place: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(tensor, name, RELOADED_BY, ranges, named)
        self.params, self.buffer, self.place = params, buffer, place
        self.stays = False  # whether it never moves, as there is no host memory for it
        self.rounding: Rounding | None = None  # the masters that round to them, if there are any
        self.columnwise = ColumnwiseCopies(param for _, param in params)
        self.is_rounded = False  # whether masters, as they were offloaded or are here, round to exactly these weights
        self.rounded_sums: Sums | None = None  # of the weights, if their masters were offloaded before them
        self.is_on_host = False  # whether the host has a copy of the weights that are away
        self.holds_another = False  # whether weights of a kept set are in its memory, and its own are away
        let_go_for(self)

    @property
    def is_here(self) -> bool:
        """Whether they are on the GPU."""
        return not self.is_away

    @property
    def trains(self) -> bool:
        """Whether it is one of DDP's buffers, even if all its parameters were frozen since, or a parameter trains."""
        return self.buffer is not None or any(param.requires_grad for _, param in self.params)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for the copies, beside files."""
        return self.copied_nbytes if self.folder is None else 0

    def matches(self, where: Where) -> bool:
        """Return whether a predicate holds for its parameters; ValueError if it holds for some of them."""
        with torch._C._EnableTorchFunction():  # whose guards refuse to read offloaded memory
            answers = {bool(where(name, param)): name for name, param in self.params}
        if len(answers) > 1:
            raise ValueError(
                f"where= holds for parameter {answers[True]!r} and not for {answers[False]!r}, which share "
                f"{self.name} and move together: have it hold for both or for neither"
            )
        return True in answers

    def forget_masters(self) -> None:
        """Trust no masters before they are compared with the weights again."""
        self.rounded_sums, self.is_rounded = None, False

    def trust_masters_of(self, sums: Sums) -> None:
        """Trust masters that were offloaded before only if they round to weights with these sums."""
        self.is_rounded = self.is_rounded and self.rounded_sums in (None, sums)

    def lacks_copy(self, sums: Sums) -> bool:
        """Return whether the host has no copy of weights with these sums."""
        return self.copied_nbytes > 0 and self.host_digests != sums

    def copy_changed(self, sums: Sums) -> int:
        """Copy weights with these sums to the host if it lacks them, on the current stream; return the bytes."""
        if not self.lacks_copy(sums):
            return 0
        self.host_digests = None  # until the copy is queued, which may raise
        copied = self.copy_out()
        self.host_digests = sums
        return copied

    def gather(self) -> None:
        """All-gather what this rank does not copy; a collective."""
        for bucket in self.buffer.buckets if self.place is not None else ():
            # Not by `start_param_sync`: mcore's record of which gathers are due stays as it was.
            data, ranks = bucket.param_data, self.buffer.data_parallel_group
            torch.distributed.all_gather_into_tensor(data, data.chunk(ranks.size())[ranks.rank()], group=ranks)

    @override
    def close(self) -> None:
        stop_for(self)
        super().close()


def sums_of(slabs: Iterable[WeightSlab]) -> dict[WeightSlab, Sums]:
    """Return the sums over what each slab copies; the host waits for them once, for all slabs."""
    slabs = list(slabs)
    parts = [part for slab in slabs for part in slab.parts]
    sums = iter(byte_sums(parts).tolist() if parts else ())
    return {slab: tuple(next(sums) for _ in slab.ranges) for slab in slabs}


class WeightOffloader:
    """Moves the weights of model chunks.

    Args:
        chunks: the model chunks.
        buffers: mcore's `_ParamAndGradBuffer`s of them.
        names: of parameters, by their `id`.
        device: the GPU that the model is on.

    Raises:
        ValueError: a parameter was taken out of DDP's buffer; or one that is in none is of a class with several tensors
            inside (FP8).
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        buffers: Sequence[Any],
        names: Mapping[int, str],
        device: torch.device,
    ) -> None:
        digest_kernel(device)  # compiled before the first sleep
        self._chunks, self._device = chunks, device
        self._states: StateOffloader | None = None
        self._all = [buffer_slab(buffer, i, names) for i, buffer in enumerate(buffers) if buffer.param_data is not None]
        # for each parameter of DDP's buffers its `id`, and the `_cdata` of its storage
        self._in_buffers = {id(param): slab.storage._cdata for slab in self._all for _, param in slab.params}
        self._all += self._slabs_outside()
        # those that packed masters need on the GPU to move: DDP's buffers, on all ranks alike
        self.read_by_masters: list[WeightSlab] = []
        self._beside = SideStream(device)
        self.is_reloading_masters = False  # whether masters are being reloaded, so that nothing can write them yet
        # whether parameters were reloaded without their masters: then a copy of the shard is cheapest
        self._wakes_alone = False

    def keep_in_files(self, folder: Path, all_are_frozen: bool) -> int:
        """Copy frozen parameters to files of a folder from now on, without page-locking; return their bytes.

        all_are_frozen: whether no optimizer updates those outside of DDP's buffers.
        """
        own = [slab for slab in self._all if slab.buffer is None]
        frozen = [slab for slab in own if all_are_frozen or not slab.trains]
        for slab in frozen:
            slab.folder = folder
        return sum(slab.nbytes for slab in frozen)

    @property
    def slabs(self) -> list[WeightSlab]:
        """The slabs that move."""
        return [slab for slab in self._all if not slab.stays]

    def chosen(self, where: Where | None) -> tuple[list[WeightSlab], bool]:
        """Return the slabs that move for which a predicate holds, and whether it holds for any slab at all."""
        if where is None:
            return self.slabs, True
        if not callable(where):
            raise ValueError(f"where={where!r}: give a function of a parameter's name and the parameter")
        slabs = [slab for slab in self.slabs if slab.matches(where)]
        return slabs, bool(slabs) or any(slab.matches(where) for slab in self._all if slab.stays)

    @property
    def unhosted_bytes(self) -> int:
        """Bytes that stay on the GPU for good."""
        return sum(slab.nbytes for slab in self._all if slab.stays)

    def round_from(self, states: StateOffloader) -> None:
        """Recompute weights from masters that round to them from now on, instead of copying them."""
        self._states = states
        states.engine.traffic.touches.before_writes.append(self.masters_may_change)
        for slab in self._all:
            slab.rounding = None if slab.buffer is None else rounding_of(slab.buffer, slab.ranges, states)
        read = states.read_storages()
        self.read_by_masters = [s for s in self.slabs if s.buffer is not None or s.storage._cdata in read]

    def _slabs_outside(self) -> list[WeightSlab]:
        """Return the parameters that have storages of their own: frozen ones, and those of models without DDP."""
        of_storages: dict[int, list[NamedParam]] = {}  # tied weights share one
        for name, storage, parameter in self._outside_of_buffers():
            if {class_of(parameter), class_of(parameter.data)} - set(PLAIN):
                raise ValueError(
                    f"parameter {name!r} outside of DDP's buffers is a {type(parameter.data).__name__}: only plain "
                    "tensors can be offloaded there; leave this model out, or keep its weights in 16 or 32 bits"
                )
            of_storages.setdefault(storage, []).append((name, parameter))
        return [WeightSlab(named[0][1], f"parameter {named[0][0]!r}", params=named) for named in of_storages.values()]

    def _outside_of_buffers(self) -> Iterator[tuple[str, int, torch.nn.Parameter]]:
        """Yield the parameters with storages of their own, each with its name and the `_cdata` of its storage."""
        for name, parameter in (named for chunk in self._chunks for named in chunk.named_parameters()):
            if not parameter.numel() or parameter.device != self._device:
                continue
            storage = parameter.untyped_storage()._cdata
            if id(parameter) not in self._in_buffers:
                yield name, storage, parameter
            elif class_of(parameter) in PLAIN and storage != self._in_buffers[id(parameter)]:
                raise ValueError(
                    f"parameter {name!r} was given other memory than DDP's buffer, where the optimizer updates it and "
                    "Residency moves it: write into it (param.data.copy_()) in place of `param.data =`"
                )

    @property
    def here(self) -> list[WeightSlab]:
        """The slabs on the GPU."""
        return [slab for slab in self.slabs if slab.is_here]

    def require_known(self) -> None:
        """Raise RuntimeError if the model has a parameter that would not be offloaded with the others.

        ValueError if one was taken out of DDP's buffer.
        """
        known = {slab.storage._cdata for slab in self._all}
        for name, storage, _ in self._outside_of_buffers():
            if storage not in known:
                raise RuntimeError(
                    f"parameter {name!r} was added, or given other memory (`param.data =`, load_state_dict(assign="
                    "True)), since this Residency was made, and would stay on the GPU: close() it and make another"
                )

    def masters_may_change(self) -> None:
        """Trust no masters from now on: they are about to be reloaded, and may be written, as a load does."""
        if not self.is_reloading_masters:
            for slab in self.slabs:
                self._forget_masters(slab)

    def masters_reloaded(self, tally: Tally) -> None:
        """End `is_reloading_masters`: masters that are on the GPU may change."""
        self.is_reloading_masters = False
        for slab in self.slabs:
            is_at_risk = slab.rounding is not None and slab.rounding.any_master_is_here()
            if is_at_risk and (copied := self._forget_masters(slab)):
                tally.copy("params", copied)

    def _forget_masters(self, slab: WeightSlab) -> int:
        """Trust a slab's masters no more; return the bytes that crossed the link.

        Weights that are away are rounded from them to the host first: a later load of masters writes no weight.
        """
        copied = 0
        if slab.is_rounded and (slab.is_away or slab.holds_another) and not slab.is_on_host:
            assert slab.rounding is not None
            copied = slab.copied_nbytes if slab.rounding.masters_are_here() else 0
            self._round_on_host(slab)
        slab.forget_masters()
        return copied

    # Offload.

    def start_offload(self, slabs: Sequence[WeightSlab], with_masters: bool, tally: Tally) -> None:
        """Start the copies of what masters do not round to and the host lacks, and note what masters round to.

        Masters are still on the GPU, and the GPU is idle. The copies go on afterwards: until `release` nothing may
        write the weights. `with_masters`: whether the optimizer's states are offloaded too.
        """
        if self._wakes_alone:  # everything is copied, whatever masters say: they are compared meanwhile
            self._copy_out(slabs, tally)
        with tally.part("compare"):
            self._compare_with_masters(slabs, with_masters)
        if not self._wakes_alone:
            self._copy_out(slabs, tally)

    def _compare_with_masters(self, slabs: Sequence[WeightSlab], with_masters: bool) -> None:
        """Compare masters that are about to be offloaded with their weights; the host waits once.

        Note the sums of weights that stay: they may change until they follow. Masters that stay while their weights
        are offloaded tell nothing: they may be written.
        """
        compared = {
            slab: slab.rounding for slab in self.here if slab.rounding is not None and slab.rounding.masters_are_here()
        }
        if not with_masters:
            for slab in slabs:
                if slab in compared:
                    slab.forget_masters()
            return
        if not compared:
            return
        agree = torch.stack([rounding.agrees() for rounding in compared.values()]).tolist()
        for slab, agrees in zip(compared, agree, strict=True):
            slab.rounded_sums, slab.is_rounded = None, agrees
        for slab, sums in sums_of(slab for slab in compared if slab.is_rounded and slab not in slabs).items():
            slab.rounded_sums = sums

    def _copy_out(self, slabs: Sequence[WeightSlab], tally: Tally) -> None:
        if not slabs:
            return
        with tally.part("params"):
            for slab in slabs:
                slab.is_on_host = False
            # The masters of the others were just compared.
            summed = [
                slab for slab in slabs if self._wakes_alone or not slab.is_rounded or slab.rounded_sums is not None
            ]
            copied, found = 0, sums_of(summed)
            with self._beside.after_current():
                for slab, sums in found.items():
                    slab.trust_masters_of(sums)
                    if not slab.is_rounded or self._wakes_alone or not slab.lacks_copy(sums):
                        copied += slab.copy_changed(sums)
                        slab.is_on_host = True
        tally.copy("params", copied)
        if copied >= RETURNED_BYTES:  # meanwhile the driver takes back gradients, and what was cached
            with tally.part("driver"):
                return_to_driver(self._device)

    def release(self, slabs: Sequence[WeightSlab]) -> int:
        """Release the memory of weights after `start_offload`; return the bytes, 0 if it was released."""
        here = [slab for slab in slabs if slab.is_here]
        if not here:
            return 0
        self._beside.synchronize()  # Race: their copies would read memory of another tensor, or of the driver.
        for slab in here:
            slab.columnwise.drop()
        return sum(slab.empty() for slab in here)

    # Reload.

    def reload(self, asked: Sequence[WeightSlab], tally: Tally, first: Callable[[], None] = lambda: None) -> None:
        """Reload the weights that are away, but for columnwise copies; a collective, even if none are away.

        asked: the slabs. Every rank that has a slab asks for it.
        first: is called before. If it fails on one rank, all raise: they would wait for that rank in the all-gather.
        """
        slabs = [slab for slab in asked if slab.is_away]

        def fill_and_write() -> None:
            first()
            with tally.part("params"):
                _require_ours(slabs)
                for slab in slabs:  # zeroed: nothing copies the gaps between parameters
                    tally.moved.freed -= slab.fill(zeroed=True)
                tally.copy("params", self._write(slabs))

        # Half-written weights must not be taken for weights. Masters and the host's copies have not changed.
        with undo_on_error(lambda: wait_for_gpu(self._device), *(slab.empty for slab in slabs)):
            on_every_rank(fill_and_write)
        for slab in slabs:
            slab.forget_masters()
            slab.is_on_host = False
        for slab in asked:  # this rank's weights may have stayed, and another's not
            slab.gather()

    def make_columnwise(self) -> None:
        """Make the columnwise copies of FP8 weights that are on the GPU."""
        for slab in self.here:
            slab.columnwise.make()

    def _write(self, slabs: Sequence[WeightSlab]) -> int:
        """Write this rank's weights; return the bytes that crossed the link."""
        roundings, copied = [], 0
        for slab in slabs:
            rounding = slab.rounding if slab.is_rounded else None
            are_here = rounding is not None and rounding.masters_are_here()
            if rounding is not None and not are_here:
                self._wakes_alone = True
            if rounding is not None and (are_here or not slab.is_on_host):
                roundings.append(rounding)
            else:
                copied += slab.copy_in()
        if roundings:
            assert self._states is not None
            copied += self._states.round_again(pair for rounding in roundings for pair in rounding.pairs)
        return copied

    # On the host.

    def on_host(self) -> list[HostParam]:
        """Return all parameters on the host, rounded there from masters or copied; raise as `Residency.host_params`."""
        away = [slab for slab in self.slabs if slab.is_away]
        if not away:
            raise RuntimeError("host_params() while parameters are on the GPU: read them there, or offload('params')")
        self.require_known()
        named = [each for chunk in self._chunks for each in chunk.named_parameters() if each[1].numel()]
        if others := [name for name, param in named if class_of(param) not in PLAIN]:
            raise ValueError(
                f"host_params() of parameter {others[0]!r}: only weights in 16 or 32 bits can be read there"
            )
        _require_ours(away)
        for slab in away:
            if not slab.is_on_host:
                self._round_on_host(slab)
        slabs = {slab.storage._cdata: slab for slab in self._all}
        found = []
        for name, param in named:
            if param.device != self._device:  # it never moves
                found.append(HostParam(name, param, 0, param.detach().cpu().view(-1)))
                continue
            size = param.element_size()
            start = int(param.storage_offset()) * size
            for first, host in slabs[param.untyped_storage()._cdata].on_host(start, start + param.numel() * size):
                found.append(HostParam(name, param, (first - start) // size, host.view(param.dtype)))
        return found

    def _round_on_host(self, slab: WeightSlab) -> None:
        assert slab.rounding is not None and self._states is not None
        slab.host_digests = None
        masters = self._states.on_host()
        for _, master, shard in slab.rounding.pairs:
            buffer = shard.buffer()
            size = buffer.element_size()
            start = (int(buffer.storage_offset()) + shard.first) * size
            ((_, host),) = slab.host_parts(start, start + shard.numel * size)
            host.view(buffer.dtype).copy_(masters.get(id(master), master).view(-1))
        slab.is_on_host = True

    def close(self) -> None:
        """Release the host memory, and forget the optimizer's states."""
        for slab in self._all:
            slab.close()
        if self._states is not None:
            self._states.engine.traffic.touches.before_writes.remove(self.masters_may_change)
        self._states = None


def _require_ours(slabs: Sequence[WeightSlab]) -> None:
    if not all(slab.is_rounded or slab.is_on_host for slab in slabs):
        raise RuntimeError(
            "parameters were sent off the GPU by something else than this Residency: bring them back the same way"
        )


def buffer_slab(buffer: Any, i: int, names: Mapping[int, str]) -> WeightSlab:
    """Return the slab of mcore's `i`th parameter buffer; this rank copies its own shard of each bucket.

    Between an optimizer step and the all-gather that follows only this shard is current. `names` has those of
    parameters, by their `id`.
    """
    ranks = buffer.data_parallel_group
    size, rank = ranks.size(), ranks.rank()
    place = (i, torch.distributed.get_global_rank(ranks, 0)) if size > 1 else None
    name = f"DDP buffer {i}'s parameter buffer"

    params = [(names.get(id(param), ""), param) for param in buffer.params]
    # Of quantized parameters the objects around what the buffer holds.
    named: list[Named] = [(f"parameter {name!r}", param) for name, param in params]
    named += [("a bucket of parameters", bucket.param_data) for bucket in buffer.buckets]
    ranges = _ranges_of([bucket.param_data.chunk(size)[rank] for bucket in buffer.buckets])
    return WeightSlab(buffer.param_data, name, ranges, named, params, buffer, place)


def _ranges_of(shards: Iterable[torch.Tensor]) -> list[Range]:
    """Return the byte ranges of tensors in their storage in order, adjacent ones as one, since one copy moves them."""
    result: list[Range] = []
    for start, nbytes in sorted((int(each.storage_offset()) * each.itemsize, each.nbytes) for each in shards):
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], start + nbytes)
        elif nbytes:
            result.append((start, start + nbytes))
    return result
