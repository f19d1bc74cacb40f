"""Which finished training step a crash leaves whole: the records of a rank, and the host buffers that they name.

In every forward and backward the host has all masters and moments anyway. Here their memory belongs to a keeper too
(`memory.keeper`), a process of the node that the trainers' death leaves alone. A process that starts again maps the
same memory and goes on: `OffloadConfig(survive_crash=True)`. A step k ends with states S(k).

Time line, of every rank:

1.  The optimizer step k writes S(k) on the GPU. Copies out of S(k) begin, and go to the buffer of each slab that the
    protected record, k-1, does not name. Slabs whose copies have none to run beside are copied in the next pass.
2.  Bridge calls `train_step` for step k+1: `capture` copies the small state, all that a checkpoint has beyond what
    slabs hold, as it is now: after the evaluation, before anything of step k+1 draws a random number.
3.  The pass begins and copies out what is left of S(k). At each point of the model `poll` looks whether all of S(k) has
    landed; if so it writes the record k: a payload, and then its head.
4.  The last backward ends: `settle` waits for what is left, and writes the record k. `vote` tells all ranks, by one
    small all-reduce on the training stream, which the updates of all ranks come after.
5.  The optimizer step k+1 is about to write the first host buffer: `before_write` reads the vote. If every rank has k,
    the record k is protected from now on, and k-1 is erased: its buffers may be written.

Invariants:

-   The buffers that the protected record names are not written. It is erased only when every rank has a newer one.
-   A record is written when all that it names has landed, in the place of the older of two, its head last; and erased
    before anything that it names is written. So a record that is whole names states that are whole.
-   So at any instruction every rank has the protected record or, if the vote has passed, the one after it, and ranks
    differ by one step at most. After a crash they take the newest step that all have.

A crash before step 4 of the step under way, k+1, repeats one finished step at most beside it; a later one repeats k+1
alone. To force the copies of step 3 would make every step wait for what the next pass hides.

With `copies_to_buddy_every=K` a round is begun every K steps: a thread sends the protected record and its states to a
rank of another node, the buddy, and gets those of the ward, whose buddy this rank is (`engines.buddies`). The vote
tells also which round each rank has whole, so all ranks begin one at the same step, and none before all have the one
before. A rank holds its own states of a round too, until all ranks have the next one: after the loss of a node its
ranks get theirs back from their buddies, and all others have theirs. So each slab has four buffers: of the round under
way, the one before, the protected record and the newest step.

Files of a rank, which the keeper holds by name: `states`, two buffers for each slab; `held`, two more with a buddy;
`third`, one for each, if background saves lend them; `buddy4` and `buddy5`, the ward's states; `slot0` to `slot3`, the
payloads of own records, `slot4` and `slot5`, of the ward's; `ledger`, one page with the heads and, after them, how
often a process has gone on from which step. A head has the step, the payload's size and checksum, and a digest of the
rank and the layout of its slabs, so that another job's or rank's states are never taken.

`memory.keeper` owns the memory; this module owns which buffer may be written; `bridge.crash` owns the small state, and
calls this. With a budget states that stay on the GPU are copied out in each step too.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from operator import itemgetter
from typing import Any, NamedTuple, override

import torch

from bridge_fgo.engines.buddies import Buddy
from bridge_fgo.engines.ranks import collectives
from bridge_fgo.memory.host_buffer import HostBuffer, MemoryFile, SharedHostBuffer
from bridge_fgo.memory.keeper import KeeperLine
from bridge_fgo.memory.slab import Slab
from bridge_fgo.memory.transfers import Transfers

PAGE = 4096
HEAD = struct.Struct("<8sqqI16s")  # magic, step, bytes and crc32 of the payload, layout; its own crc32 follows
CRC = struct.Struct("<I")
MAGIC = b"FGOKEPT1"
TRIES = struct.Struct("<qq")  # the step that a process has gone on from last, and how often in a row
TRIES_AT = 2048  # where they are in the ledger
HEADS_APART = 128
HEAD_BYTES = HEAD.size + CRC.size
OWN, WARDS = range(4), range(4, 6)  # slots
NOTHING = torch.empty(0, dtype=torch.uint8)


class Payload(NamedTuple):
    """The contents of a record, beside its step."""

    table: bytes  # the number of the buffer that has each slab
    config: bytes  # the config that trained, as `bridge.crash` writes it
    small: bytes  # the small state, pickled
    beside: bytes  # of the model's tensors that no slab tells


class _Pickler(pickle.Pickler):
    """Pickles the bytes of tensors alone: torch's own way takes the host as long as all the rest."""

    @override
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        data = obj.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, obj.dtype, obj.shape, obj.device.type)


def _tensor(data: bytes, dtype: torch.dtype, shape: torch.Size, device: str) -> torch.Tensor:
    found = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return found.view(shape).to(device)


class Landing:
    """A copy of a tensor in host memory, which the current stream makes: the host does not wait."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event = torch.cuda.Event() if tensor.is_cuda else None
        self._tensor = tensor
        if self._event is not None:
            self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self._event.record()

    def has_landed(self) -> bool:
        """Return whether the host has it."""
        return self._event is None or self._event.query()

    def wait(self) -> torch.Tensor:
        """Wait for it, and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


class Pending(NamedTuple):
    """A record that waits for copies."""

    step: int
    config: bytes
    small: bytes
    beside: Landing


class KeptBuffer(SharedHostBuffer):
    """A slab's host buffer in a file that a keeper has too: its bytes outlive this process.

    `copy` is its number: 0 and 1, 2 where one may be lent, 3 and 4 with a buddy.
    """

    def __init__(self, steps: KeptSteps, slab: int, copy: int, nbytes: int, start: int, file: MemoryFile) -> None:
        self._steps, self._slab, self.copy = steps, slab, copy
        self._start, self._file = start, file
        super().__init__(nbytes)

    @override
    def _map(self, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(self._file.memory, dtype=torch.uint8, offset=self._start, count=nbytes)

    @override
    def before_write(self) -> None:
        self._steps.before_write()

    @override
    def before_update(self) -> None:
        self._steps.settle()  # its record waits for copies that read what is about to be written

    @override
    def to_lend(self) -> SharedHostBuffer:
        return self._steps.buffer(self._slab, 2)

    @property
    @override
    def is_taken(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether it is lent, or a record that stays names it."""
        return self.is_lent or any(each.table[self._slab] == self.copy for each in self._steps.staying)


class Record(NamedTuple):
    """A record by its step, where its payload is, and which buffer has each slab."""

    step: int
    slot: int
    table: bytes


class KeptSteps:
    """The records of a rank; see the module's docstring.

    Args:
        slabs: of all sources, in their order.
        transfers: what copies them.
        line: the rank's keeper.
        job: what has to be the same for a step to be taken, beside the slabs.
        has_buddy: whether steps are to be held for `join`.
    """

    def __init__(
        self, slabs: Sequence[Slab], transfers: Transfers, line: KeeperLine, job: str, has_buddy: bool = False
    ) -> None:
        self._slabs, self._transfers, self._line = list(slabs), transfers, line
        states = [[(s.kind, s.name, s.dtype, tuple(s.param.shape)) for s in slab.states] for slab in slabs]
        self.sizes = [slab.nbytes for slab in slabs]
        self.layout = sha256(repr((job, self.sizes, states)).encode()).digest()[:16]
        self._starts = _starts(self.sizes)
        self._ledger, _ = line.file("ledger", PAGE)
        self._slots = [line.file(f"slot{slot}")[0] for slot in (*OWN, *WARDS)]
        self._files: dict[str, tuple[MemoryFile, bool]] = {}
        self._copies = (0, 1, 3, 4) if has_buddy else (0, 1)
        for name in ("states", "held")[: len(self._copies) // 2]:
            self._file(name, 2 * self._starts[-1])  # while a rank that has no room for it is no rank's error yet
        read = [self._read(slot) for slot in (*OWN, *WARDS)]
        newest = max((found for found in read[: len(OWN)] if found), key=itemgetter(0), default=None)
        self.last_config = b"" if newest is None else newest[2].config  # of the newest record, whatever its slabs
        # the records that this rank has whole, by their steps, and the layouts of its ward's
        self.found = {f[0]: (slot, f[2]) for slot, f in enumerate(read[: len(OWN)]) if f and f[1] == self.layout}
        self.of_ward = {f[0]: (slot, f[1]) for slot, f in enumerate(read) if f and slot in WARDS}
        self.nbytes = len(self._copies) * self._starts[-1]  # of the buffers
        self.received: list[KeptBuffer] = []
        self._buddy: Buddy | None = None
        self._held: list[Record] = []  # of the newest rounds: the one that every rank has whole, and the one under way
        self.protected: Record | None = None
        self._written: Record | None = None  # a record that not every rank is known to have
        self._pending: Pending | None = None
        self._landing: list[Slab] | None = None  # whose copies out it waits for; None before they are started
        self._captured = -1  # the step of the newest record that was begun
        self._ballot: Landing | None = None

    # A start.

    def _read(self, slot: int) -> tuple[int, bytes, Payload] | None:
        head = os.pread(self._ledger, HEAD_BYTES, slot * HEADS_APART)
        magic, step, nbytes, crc, layout = HEAD.unpack_from(head)
        if magic != MAGIC or CRC.unpack_from(head, HEAD.size)[0] != zlib.crc32(head[: HEAD.size]):
            return None
        payload = os.pread(self._slots[slot], nbytes, 0)
        return (step, layout, Payload(*pickle.loads(payload))) if zlib.crc32(payload) == crc else None

    def tries(self, step: int) -> int:
        """Return how often in a row processes have gone on from a step."""
        last, count = TRIES.unpack(os.pread(self._ledger, TRIES.size, TRIES_AT))
        return count if last == step else 0

    def take_buffers(self, step: int | None, held: int | None = None) -> None:
        """Give each slab its buffers; those with the states of `step`, which every rank has, are protected.

        Those of `held`, a round, stay too, and so does the ward's record of it.
        """
        records = {each: Record(each, slot, payload.table) for each, (slot, payload) in self.found.items()}
        self.protected = None if step is None else records[step]
        self._held = [records[held]] if held is not None else []
        stay = {each.slot for each in self.staying} | {slot for each, (slot, _) in self.of_ward.items() if each == held}
        for slot in {*OWN, *WARDS} - stay:
            self._erase(slot)
        self._next = next(slot for slot in WARDS if slot not in stay)
        for number, slab in enumerate(self._slabs):
            copies = {*self._copies, *(each.table[number] for each in self.staying)}
            buffers = [self.buffer(number, copy) for copy in sorted(copies)]
            slab.host.close()
            slab.least_spares = len(self._copies) - 1
            _use(slab, next(each for each in buffers if not each.is_taken), buffers)  # built, it is written

    def buffer(self, slab: int, copy: int) -> KeptBuffer:
        """Return the buffer of a slab with a number. MemoryError: the keeper has no room for it."""
        name, place = (("states", 0), ("states", 1), ("third", 0), ("held", 0), ("held", 1))[copy]
        file, was_there = self._file(name, (1 + (name != "third")) * self._starts[-1])
        start = self._starts[slab] + place * self._starts[-1]
        buffer = KeptBuffer(self, slab, copy, self.sizes[slab], start, file)
        if was_there:
            buffer.untouched_bytes = 0
        return buffer

    def _file(self, name: str, nbytes: int) -> tuple[MemoryFile, bool]:
        if name not in self._files:
            file, was_there = self._line.file(name, nbytes)
            self._files[name] = MemoryFile(nbytes, file), was_there
        return self._files[name]

    def small_state(self) -> tuple[Any, bytes]:
        """Return the small state of the protected record, and the bytes of the tensors beside it."""
        assert self.protected is not None
        payload = self.found[self.protected.step][1]
        return pickle.loads(payload.small), payload.beside

    def adopt(self) -> None:
        """Have every slab's host buffer be the one that the protected record names; the slabs are released."""
        assert self.protected is not None
        self._captured, _, table = self.protected
        for slab, copy in zip(self._slabs, table, strict=True):
            _use(slab, next(h for h in slab.hosts if isinstance(h, KeptBuffer) and h.copy == copy), slab.hosts)
        os.pwrite(self._ledger, TRIES.pack(self._captured, self.tries(self._captured) + 1), TRIES_AT)
        self.found.clear()

    def forget(self) -> None:
        """Erase all records: nobody is to go on from them."""
        self.end_rounds()
        if self._buddy is not None:
            self._buddy.begun = self._buddy.whole = -1
        for slot in (*OWN, *WARDS):
            self._erase(slot)
        self.protected = self._written = self._pending = None
        self._held = []

    @property
    def staying(self) -> list[Record]:
        """The records whose buffers are not to be written."""
        return [*self._held, self.protected] if self.protected is not None else self._held

    def _drop(self, record: Record) -> None:
        if record not in self.staying:
            self._erase(record.slot)

    def _erase(self, slot: int) -> None:
        os.pwrite(self._ledger, bytes(HEAD.size), slot * HEADS_APART)

    # A step.

    def capture(self, step: int, config: bytes, small: Callable[[], Any], beside: Sequence[torch.Tensor]) -> None:
        """Begin the record of the step that has ended; `small` makes its small state."""
        self._learn()
        if step == self._captured:
            return
        self._captured, self._landing = step, None
        _Pickler(file := io.BytesIO(), protocol=5).dump(small())
        flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in beside]
        self._pending = Pending(step, config, file.getvalue(), Landing(torch.cat(flat or [NOTHING])))

    def poll(self) -> None:
        """Write the record that was begun, if all of it has landed; the copies of all slabs have been started."""
        if self._pending is None:
            return
        if self._landing is None:
            self._landing = list(self._slabs)
        while self._landing and self._transfers.has_left(self._landing[-1]):
            self._landing.pop()
        if not self._landing and self._pending.beside.has_landed():
            self._write(self._pending)

    def settle(self) -> None:
        """Wait for all of the record that was begun, and write it; without copies that were started there is none."""
        if self._pending is not None and self._landing is not None:
            # Race: a record would name what has not landed, and be taken if the process died now.
            self._transfers.finish_out()
            self._write(self._pending)
        self._pending = None

    def _write(self, record: Pending) -> None:
        table = bytes(slab.host.copy for slab in self._slabs if isinstance(slab.host, KeptBuffer))
        slot = self._written.slot if self._written is not None else self._free_slot()
        self._put(
            slot, record.step, Payload(table, record.config, record.small, record.beside.wait().numpy().tobytes())
        )
        self._written, self._pending = Record(record.step, slot, table), None

    def _free_slot(self) -> int:
        return min(set(OWN) - {each.slot for each in self.staying})

    def _put(self, slot: int, step: int, contents: Payload) -> None:
        payload = pickle.dumps(tuple(contents), protocol=5)
        head = HEAD.pack(MAGIC, step, len(payload), zlib.crc32(payload), self.layout)
        self._put_bytes(slot, head + CRC.pack(zlib.crc32(head)) + payload)

    def _put_bytes(self, slot: int, record: bytes) -> None:
        os.pwrite(self._slots[slot], record[HEAD_BYTES:], 0)  # until its head is written, it is not that of another
        os.pwrite(self._ledger, record[:HEAD_BYTES], slot * HEADS_APART)

    def vote(self, device: torch.device) -> None:
        """Tell every rank the step of this one's newest record: a collective; the host does not wait for it.

        What the training stream gets next, the updates of every rank, comes after it.
        """
        self._learn()
        newest = self._written or self.protected
        ballot = torch.full((2,), -1 if newest is None else newest.step, device=device)
        if self._buddy is not None:
            ballot[1:].fill_(self._buddy.whole)
        if torch.distributed.is_initialized():
            with collectives:
                torch.distributed.all_reduce(ballot, torch.distributed.ReduceOp.MIN)
        self._ballot = Landing(ballot)

    def before_write(self) -> None:
        """Learn what ranks have told: a host buffer is about to be written. Erase a record that is not whole then."""
        self._learn()
        if self._written is not None:  # not every rank has it, so that it is not protected
            self._erase(self._written.slot)
            self._written = None

    def _learn(self) -> None:
        ballot, self._ballot = self._ballot, None
        if ballot is None:
            return
        step, whole = ballot.wait().tolist()
        if self._written is not None and step >= self._written.step:
            older, self.protected, self._written = self.protected, self._written, None
            if older is not None:
                self._drop(older)
        if self._buddy is not None and whole == self._buddy.begun:  # on every rank, or on none
            older, self._held = self._held[:-1], self._held[-1:]
            for each in older:
                self._drop(each)
            if step >= whole + self._buddy.every and self.protected is not None:
                self._held.append(self.protected)
                self._buddy.begin(step, partial(self._round, self._buddy, self.protected))

    # Other nodes.

    def end_rounds(self) -> None:
        """Wait for the round under way: training is over."""
        self._learn()  # else some ranks would have begun one, and others not
        if self._buddy is not None:
            self._buddy.end()

    def join(self, buddy: Buddy, sizes: Sequence[int]) -> None:
        """Take memory for the states of a ward, whose slabs have these sizes. MemoryError: no room for it."""
        self._buddy, self._starts_of_ward, self._sizes_of_ward = buddy, _starts(sizes), list(sizes)
        for slot in WARDS:
            nbytes = self._starts_of_ward[-1]
            file, was_there = self._file(f"buddy{slot}", nbytes)
            self.nbytes += nbytes
            self.received.append(buffer := KeptBuffer(self, 0, 0, nbytes, 0, file))
            if was_there:
                buffer.untouched_bytes = 0

    def restore(self, step: int, lacking: Sequence[int]) -> None:
        """Have the ranks that lack a step get it from their buddies."""
        buddy = self._buddy
        assert buddy is not None
        lent = self._sent(slot := self.of_ward[step][0], self._of_ward(slot)) if buddy.ward in lacking else ()
        if buddy.rank not in lacking:
            buddy.swap(buddy.ward, lent, None, ())
            return
        for slot in OWN:
            self._erase(slot)
        table = bytes(len(self._slabs))
        record = buddy.swap(buddy.ward, lent, buddy.ahead, self._places(table))
        payload = Payload(*pickle.loads(record[HEAD_BYTES:]))._replace(table=table)
        self._put(0, step, payload)
        self.found, self.last_config = {step: (0, payload)}, payload.config

    def _round(self, buddy: Buddy, record: Record) -> None:
        """Send a record that stays to the buddy, and get the ward's in the place of the older of two."""
        self._erase(slot := self._next)
        got = buddy.swap(
            buddy.ahead, self._sent(record.slot, self._places(record.table)), buddy.ward, self._of_ward(slot)
        )
        if not buddy.is_over:
            self._put_bytes(slot, got)
        self._next = sum(WARDS) - slot

    def _sent(self, slot: int, places: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        head = os.pread(self._ledger, HEAD_BYTES, slot * HEADS_APART)
        record = bytearray(head + os.pread(self._slots[slot], HEAD.unpack_from(head)[2], 0))
        return [torch.frombuffer(record, dtype=torch.uint8), *places]

    def _places(self, table: bytes) -> list[torch.Tensor]:
        return [self.buffer(number, copy).tensor for number, copy in enumerate(table)]

    def _of_ward(self, slot: int) -> list[torch.Tensor]:
        whole = self.received[WARDS.index(slot)].tensor
        starts, sizes = self._starts_of_ward, self._sizes_of_ward
        return [whole[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=False)]


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(-(-nbytes // PAGE) * PAGE for nbytes in sizes)]


def _use(slab: Slab, host: HostBuffer, hosts: Sequence[HostBuffer]) -> None:
    slab.host, slab.spares = host, [each for each in hosts if each is not host]
