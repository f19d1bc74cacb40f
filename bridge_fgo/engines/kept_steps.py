"""Which finished training step a crash leaves whole: the records of a rank, and the host buffers that they name.

The host has all masters and moments in every forward and backward. With `OffloadConfig(survive_crash=True)` their
memory belongs to a keeper too (`memory.keeper`), a process of the node that the trainers' death leaves alone: one that
starts again maps the same memory and goes on. A step k ends with states S(k). On every rank:

1.  The optimizer step k writes S(k) on the GPU. Copies out go to the buffer of each slab that the protected record,
    k-1, does not name; those that have none to run beside are left to the next pass.
2.  Bridge calls `train_step` for step k+1: `capture` copies the small state, all that a checkpoint has beyond what
    slabs hold, as it is now: after the evaluation, before anything of step k+1 draws a random number.
3.  At each point of the model `poll` looks whether all of S(k) has landed; if so it writes the record k: a payload, and
    then its head. To force that earlier would make every step wait for what the pass hides.
4.  The last backward ends: `settle` waits for what is left, and writes the record k. `vote` tells all ranks, by one
    small all-reduce on the training stream, which the updates of all ranks come after.
5.  The optimizer step k+1 is about to write the first host buffer: `before_write` reads the vote. If every rank has k,
    the record k is protected from now on, and k-1 is erased: its buffers may be written.

So a record that is whole names states that are whole, and at any instruction every rank has the protected record or, if
the vote has passed, the one after it. After a crash ranks take the newest step that all have: one before 4. repeats one
finished step at most beside k+1, a later one k+1 alone.

With `copies_to_buddy_every=K` all ranks begin a round every K steps, where the vote tells that all have the one before
whole: a thread sends the protected record and its states to the buddy, a rank of another node, and gets those of the
ward (`engines.buddies`). A rank's own states of a round stay too until all ranks have the next one: after the loss of a
node its ranks get theirs from their buddies, and others have theirs. So each slab has four buffers: of the round under
way, the one before, the protected record and the newest step.

Files of a rank, which the keeper holds by name: `states`, two buffers for each slab; `held`, two more with a buddy;
`third`, one, if background saves lend them; `buddy4` and `buddy5`, the ward's; `slot0` to `slot5`, payloads; `ledger`,
their heads and how often a process has gone on from which step. A head has a digest of the rank and the layout of its
slabs, so that no states of another job or rank are taken.

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

from bridge_fgo.engines.buddies import Buddy, wait_for_round
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
        buddy: to whom and from whom steps are copied, if they are.
    """

    def __init__(
        self, slabs: Sequence[Slab], transfers: Transfers, line: KeeperLine, job: str, buddy: Buddy | None = None
    ) -> None:
        self._slabs, self._transfers, self._line = list(slabs), transfers, line
        states = [[(s.kind, s.name, s.dtype, tuple(s.param.shape)) for s in slab.states] for slab in slabs]
        sizes = [slab.nbytes for slab in slabs]
        self.layout = sha256(repr((job, sizes, states)).encode()).digest()[:16]
        self._starts = [0, *itertools.accumulate(-(-nbytes // PAGE) * PAGE for nbytes in sizes)]
        self._copies, self.nbytes = [0, 1], 2 * self._starts[-1]  # numbers of the buffers, and bytes of all
        self._ledger, _ = line.file("ledger", PAGE)
        self._slots = [line.file(f"slot{slot}")[0] for slot in (*OWN, *WARDS)]
        self._files: dict[str, tuple[MemoryFile, bool]] = {}
        self._file("states")  # while a rank that has no room for it is no rank's error yet
        read = [self._read(slot) for slot in (*OWN, *WARDS)]
        newest = max((found for found in read[: len(OWN)] if found), key=itemgetter(0), default=None)
        self.last_config = b"" if newest is None else newest[2].config  # of the newest record, whatever its slabs
        # the records that this rank has whole, by their steps, and the layouts of its ward's
        self.found = {f[0]: (slot, f[2]) for slot, f in enumerate(read[: len(OWN)]) if f and f[1] == self.layout}
        self.of_ward = {f[0]: (slot, f[1]) for slot, f in enumerate(read) if f and slot in WARDS}
        self._buddy = buddy
        if buddy is not None:
            self._copies, nbytes = [0, 1, 3, 4], sum(buddy.sizes_of_ward)
            self._file("held")
            self.hosts_of_ward = [self._buffer(f"buddy{slot}", -1, 0, nbytes) for slot in WARDS]
            states = (host.tensor.split(buddy.sizes_of_ward) for host in self.hosts_of_ward)
            self.received = dict(zip(WARDS, states, strict=True))
            self.nbytes = 2 * (self.nbytes + nbytes)
        self._held: list[Record] = []  # of the newest rounds: the one that every rank has whole, and the one under way
        self.protected: Record | None = None
        self._written: Record | None = None  # a record that not every rank is known to have
        self._pending: tuple[int, Payload, Landing] | None = None  # a record that waits for copies, and its `beside`
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
        return self._buffer(name, slab, copy, self._slabs[slab].nbytes, self._starts[slab] + place * self._starts[-1])

    def _buffer(self, name: str, slab: int, copy: int, nbytes: int, start: int = 0) -> KeptBuffer:
        file, was_there = self._file(name, nbytes if slab < 0 else None)
        buffer = KeptBuffer(self, slab, copy, nbytes, start, file)
        if was_there:
            buffer.untouched_bytes = 0
        return buffer

    def _file(self, name: str, nbytes: int | None = None) -> tuple[MemoryFile, bool]:
        if name not in self._files:
            nbytes = nbytes or (1 if name == "third" else 2) * self._starts[-1]
            file, was_there = self._line.file(name, nbytes)
            self._files[name] = MemoryFile(nbytes, file), was_there
        return self._files[name]

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
        self._pending = step, Payload(b"", config, file.getvalue(), b""), Landing(torch.cat(flat or [NOTHING]))

    def poll(self) -> None:
        """Write the record that was begun, if all of it has landed; the copies of all slabs have been started."""
        if self._pending is None:
            return
        if self._landing is None:
            self._landing = list(self._slabs)
        while self._landing and self._transfers.has_left(self._landing[-1]):
            self._landing.pop()
        if not self._landing and self._pending[2].has_landed():
            self._write(*self._pending)

    def settle(self) -> None:
        """Wait for all of the record that was begun, and write it; without copies that were started there is none."""
        if self._pending is not None and self._landing is not None:
            # Race: a record would name what has not landed, and be taken if the process died now.
            self._transfers.finish_out()
            self._write(*self._pending)
        self._pending = None

    def _write(self, step: int, contents: Payload, beside: Landing) -> None:
        table = bytes(slab.host.copy for slab in self._slabs if isinstance(slab.host, KeptBuffer))
        contents = contents._replace(table=table, beside=beside.wait().numpy().tobytes())
        slot = min({*OWN} - {each.slot for each in self.staying}) if self._written is None else self._written.slot
        self._put(slot, self._packed(step, contents))
        self._written, self._pending = Record(step, slot, table), None

    def _packed(self, step: int, contents: Payload) -> bytes:
        payload = pickle.dumps(tuple(contents), protocol=5)
        head = HEAD.pack(MAGIC, step, len(payload), zlib.crc32(payload), self.layout)
        return head + CRC.pack(zlib.crc32(head)) + payload

    def _put(self, slot: int, record: bytes) -> None:
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
        (step, whole), before, buddy = ballot.wait().tolist(), self.staying, self._buddy
        if self._written is not None and step >= self._written.step:
            self.protected, self._written = self._written, None
        if buddy is not None and whole == buddy.begun:  # on every rank, or on none
            self._held = self._held[-1:]
            if self.protected is not None and step >= whole + buddy.every:
                self._held.append(self.protected)
                buddy.begin(step, partial(self._round, buddy, self.protected))
        for each in before:
            if each not in self.staying:
                self._erase(each.slot)

    # Other nodes.

    def end_rounds(self) -> None:
        """Wait for the round under way: training is over."""
        self._learn()  # else some ranks would have begun one, and others not
        wait_for_round()

    def restore(self, buddy: Buddy, step: int, lacking: Sequence[int]) -> None:
        """Have the ranks that lack a step get it from their buddies."""
        lacks, table = buddy.rank in lacking, bytes(len(self._slabs))
        for slot in OWN if lacks else ():
            self._erase(slot)
        sent = self._sent(slot := self.of_ward[step][0], self.received[slot]) if buddy.ward in lacking else ()
        record = buddy.swap(buddy.ward, sent, buddy.buddy if lacks else None, self._places(table))
        if lacks:
            payload = Payload(*pickle.loads(record[HEAD_BYTES:]))._replace(table=table)
            self._put(0, self._packed(step, payload))
            self.found, self.last_config = {step: (0, payload)}, payload.config

    def _round(self, buddy: Buddy, record: Record) -> None:
        """Send a record that stays to the buddy, and get the ward's in the place of the older of two."""
        self._erase(slot := self._next)
        sent = self._sent(record.slot, self._places(record.table))
        self._put(slot, buddy.swap(buddy.buddy, sent, buddy.ward, self.received[slot]))
        self._next = sum(WARDS) - slot

    def _sent(self, slot: int, places: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        head = os.pread(self._ledger, HEAD_BYTES, slot * HEADS_APART)
        record = bytearray(head + os.pread(self._slots[slot], HEAD.unpack_from(head)[2], 0))
        return [torch.frombuffer(record, dtype=torch.uint8), *places]

    def _places(self, table: bytes) -> list[torch.Tensor]:
        return [self.buffer(number, copy).tensor for number, copy in enumerate(table)]


def _use(slab: Slab, host: HostBuffer, hosts: Sequence[HostBuffer]) -> None:
    slab.host, slab.spares = host, [each for each in hosts if each is not host]
