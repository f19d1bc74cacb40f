"""Records each finished training step, and the host buffers with its states, so that a crash leaves one step whole.

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

The keeper holds a rank's files by name: `statesN`, the buffer N of all slabs; `buddyN`, the ward's states of slot N;
`slotN`, a record. A record's head has a digest of the rank and the layout of its slabs, so that no states of another
job or rank are taken. With a budget states that stay on the GPU are copied out in each step too.
"""

from __future__ import annotations

import itertools
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import sha256
from typing import NamedTuple, override

import torch

from bridge_fgo.engines.buddies import Buddy, wait_for_round
from bridge_fgo.engines.ranks import collectives
from bridge_fgo.memory.host_buffer import HostBuffer, MemoryFile, SharedHostBuffer
from bridge_fgo.memory.keeper import KeeperLine
from bridge_fgo.memory.slab import Slab
from bridge_fgo.memory.transfers import Transfers

PAGE = 4096
HEAD = struct.Struct("<8sq16sqI")  # magic, step, layout, and of the payload the bytes and a crc32 that begins by step
MAGIC = b"FGOKEPT2"
ANY = bytes(16)  # layout of a slot that is not of a step
OWN, WARDS, CONFIG, TRIES = range(4), range(4, 6), 6, 7  # slots: of steps, of the ward's, and of what a start asks
LENT = 4  # number of the buffers that background saves lend
NOTHING = torch.empty(0, dtype=torch.uint8)
type KeptFile = tuple[MemoryFile, bool]  # and whether the keeper had it before


class Record(NamedTuple):
    """A step that is whole, and where."""

    step: int
    slot: int
    table: bytes  # the number of the buffer that has each slab
    small: bytes = b""  # as `capture` gets it, then the bytes of the tensors beside; only of an earlier process's step


class Landing:
    """A copy of a tensor in host memory, which the current stream makes: the host does not wait."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)
        self._event = torch.get_device_module(tensor.device).Event()
        self._event.record()
        self.has_landed: Callable[[], bool] = self._event.query  # whether the host has it

    def wait(self) -> torch.Tensor:
        """Wait for it, and return it."""
        self._event.synchronize()
        return self._host


class KeptBuffer(SharedHostBuffer):
    """A slab's host buffer in a file that a keeper has too: its bytes outlive this process.

    `copy` is its number: 0 and 1, 2 and 3 with a buddy, `LENT` if the others may be lent.
    """

    def __init__(self, steps: KeptSteps, slab: int, copy: int, nbytes: int, start: int, file: KeptFile) -> None:
        self._steps, self._slab, self.copy = steps, slab, copy
        self._start, (self._file, was_there) = start, file
        super().__init__(nbytes)
        if was_there:
            self.untouched_bytes = 0

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
        return self._steps.buffer(self._slab, LENT)

    @property
    @override
    def is_taken(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether it is lent, or a record that stays names it."""
        return self.is_lent or any(each.table[self._slab] == self.copy for each in self._steps.staying)


def layout_of(slabs: Sequence[Slab], rank: int, ranks: int) -> bytes:
    """Return a digest of what has to be the same for a step of this rank to be taken."""
    states = [[(s.kind, s.name, s.dtype, tuple(s.param.shape)) for s in slab.states] for slab in slabs]
    return sha256(repr((rank, ranks, [slab.nbytes for slab in slabs], states)).encode()).digest()[:16]


def common_start(own: Sequence[set[int]], by_buddy: Sequence[set[int]]) -> tuple[int | None, list[int], int | None]:
    """Return the newest step that every rank can have, the ranks that get it from their buddies, and the newest round.

    Of the round, which is whole, every rank and every buddy has the step; it is None after the loss of a node.

    Args:
        own: steps that each rank has.
        by_buddy: steps of it that its buddy has; none of a job without buddies.
    """
    step = max(set.intersection(*map(set.union, own, by_buddy)), default=None)
    lacking = [rank for rank, steps in enumerate(own) if step is not None and step not in steps]
    return step, lacking, None if lacking else max(set.intersection(*own, *by_buddy), default=None)


class KeptSteps:
    """The records of a rank; see the module's docstring.

    Args:
        slabs: of all sources, in their order.
        transfers: what copies them.
        line: the rank's keeper.
        layout: `layout_of` the slabs.
        buddy: to whom and from whom steps are copied, if they are.

    Raises:
        OSError, MemoryError: the keeper has ended, or has no room; or a round of an earlier training has not ended.
    """

    def __init__(
        self, slabs: Sequence[Slab], transfers: Transfers, line: KeeperLine, layout: bytes, buddy: Buddy | None = None
    ) -> None:
        if not wait_for_round():
            raise TimeoutError("a copy to another node of an earlier training of this process has not ended")
        self._slabs, self._transfers, self._line = list(slabs), transfers, line
        self._layout, self._buddy = layout, buddy
        self._starts = [0, *itertools.accumulate(-(-slab.nbytes // PAGE) * PAGE for slab in slabs)]
        self._copies = range(2 if buddy is None else 4)  # numbers of the buffers of each slab
        self._files: dict[str, KeptFile] = {}
        self._slots = [line.file(f"slot{slot}")[0] for slot in (*OWN, *WARDS, CONFIG, TRIES)]
        for file in self._slots:
            weakref.finalize(self, os.close, file).atexit = False  # at exit `bridge.crash` erases records
        _, self.config = self._read(CONFIG) or (0, b"")  # that the records were trained with, as `bridge.crash` has it
        # Race: a file of another size is another file, and a record that names the one before would be found again.
        self.found = self._records(OWN, layout)
        self.of_ward = {} if buddy is None else self._records(WARDS, buddy.layout_of_ward)
        for copy in self._copies:  # now, while a rank that has no room for them is no rank's error yet
            self._file(f"states{copy}", self._starts[-1])
        self.nbytes = len(self._copies) * self._starts[-1]
        self.hosts_of_ward: list[KeptBuffer] = []
        if buddy is not None:
            sizes, nbytes = buddy.sizes_of_ward, sum(buddy.sizes_of_ward)
            files = {slot: self._file(f"buddy{slot}", nbytes) for slot in WARDS}
            self.hosts_of_ward = [KeptBuffer(self, -1, slot, nbytes, 0, file) for slot, file in files.items()]
            self.received = {host.copy: host.tensor.split(sizes) for host in self.hosts_of_ward}
            self.nbytes += 2 * nbytes
        self._held: list[Record] = []  # of the newest rounds: the one that every rank has whole, and the one under way
        self.protected: Record | None = None
        self._written: Record | None = None  # a record that not every rank is known to have
        self._pending: tuple[int, bytes, Landing] | None = None  # a record that waits for copies
        self._is_started = False  # whether these copies have been
        self._ballot: Landing | None = None

    def _file(self, name: str, nbytes: int) -> KeptFile:
        if name not in self._files:
            file, was_there = self._line.file(name, nbytes)
            self._files[name] = MemoryFile(nbytes, file), was_there
        return self._files[name]

    def buffer(self, slab: int, copy: int) -> KeptBuffer:
        """Return the buffer of a slab with a number. MemoryError: the keeper has no room for it."""
        file = self._file(f"states{copy}", self._starts[-1])
        return KeptBuffer(self, slab, copy, self._slabs[slab].nbytes, self._starts[slab], file)

    # Slots.

    def _read(self, slot: int, layout: bytes = ANY) -> tuple[int, bytes] | None:
        head = os.pread(self._slots[slot], HEAD.size, 0)
        if not head.startswith(MAGIC):
            return None
        _, step, of, nbytes, crc = HEAD.unpack(head)
        payload = os.pread(self._slots[slot], nbytes, HEAD.size)
        return (step, payload) if of == layout and crc == zlib.crc32(payload, step) else None

    def _write(self, slot: int, step: int, payload: bytes, layout: bytes = ANY) -> None:
        os.pwrite(self._slots[slot], payload, HEAD.size)  # until its head is written, it is not that of another
        head = HEAD.pack(MAGIC, step, layout, len(payload), zlib.crc32(payload, step))
        os.pwrite(self._slots[slot], head, 0)

    def _erase(self, slots: Iterable[int]) -> None:
        for slot in slots:
            os.pwrite(self._slots[slot], bytes(HEAD.size), 0)

    def _records(self, slots: Iterable[int], layout: bytes) -> dict[int, Record]:
        """Return the records of a layout that are whole, by their steps; erase others."""
        found, end = {}, len(self._slabs)
        for slot in slots:
            if (read := self._read(slot, layout)) is None:
                self._erase([slot])
            else:
                step, payload = read
                found[step] = Record(step, slot, payload[:end], payload[end:])
        return found

    # A start.

    def keep_config(self, config: bytes) -> None:
        """Keep the config that trains from now on."""
        if config != self.config:
            self._write(CONFIG, 0, config)

    def tries(self, step: int) -> int:
        """Return how often in a row processes have gone on from a step."""
        last, count = self._read(TRIES) or (None, b"")
        return int(count) if last == step else 0

    def protect(self, step: int | None, whole: int | None = None) -> None:
        """Have the states of `step`, which every rank has, stay as they are, and erase other records; None: all.

        With a buddy those of the newest round that is `whole` stay too, without one those of `step`, and the ward's.
        """
        self.protected = None if step is None else self.found[step]
        stays = step if whole is None else whole
        if self._buddy is not None:
            self._buddy.begun = self._buddy.whole = -1 if whole is None else whole
            self._held = [] if stays is None else [self.found[stays]]
        of_ward = [each.slot for each in self.of_ward.values() if each.step == stays]
        tries = () if self.staying else (TRIES,)  # a step of the same number that is made anew is another one
        self._erase({*OWN, *WARDS, *tries} - {*of_ward, *(each.slot for each in self.staying)})
        self._next = next(slot for slot in WARDS if slot not in of_ward)

    def take_buffers(self) -> None:
        """Give each slab its buffers."""
        for number, slab in enumerate(self._slabs):
            copies = {*self._copies, *(each.table[number] for each in self.staying)}
            buffers = [self.buffer(number, copy) for copy in sorted(copies)]
            slab.host.close()
            slab.least_spares = len(self._copies) - 1
            _use(slab, next(each for each in buffers if not each.is_taken), buffers)  # built, it is written

    def adopt(self) -> None:
        """Have every slab's host buffer be the one that the protected record names; the slabs are released."""
        assert self.protected is not None
        step, _, table, _ = self.protected
        for slab, copy in zip(self._slabs, table, strict=True):
            _use(slab, next(h for h in slab.hosts if isinstance(h, KeptBuffer) and h.copy == copy), slab.hosts)
        self._write(TRIES, step, str(self.tries(step) + 1).encode())
        self.found.clear()

    @property
    def staying(self) -> list[Record]:
        """The records whose buffers are not to be written."""
        return [*self._held, self.protected] if self.protected is not None else self._held

    # A step.

    def capture(self, step: int, small: bytes, beside: Sequence[torch.Tensor]) -> None:
        """Begin the record of the step that has ended, of its small state and the tensors beside that."""
        self._learn()
        flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in beside]
        self._pending, self._is_started = (step, small, Landing(torch.cat(flat or [NOTHING]))), False

    def poll(self) -> None:
        """Write the record that was begun, if all of it has landed; the copies of all slabs have been started."""
        if self._pending is not None:
            self._is_started = True
            if all(map(self._transfers.has_left, reversed(self._slabs))) and self._pending[2].has_landed():
                self._record(*self._pending)

    def settle(self) -> None:
        """Wait for all of the record that was begun, and write it; without copies that were started there is none."""
        if self._pending is not None and self._is_started:
            # Race: a record would name what has not landed, and be taken if the process died now.
            self._transfers.finish_out()
            self._record(*self._pending)
        self._pending = None

    def _record(self, step: int, small: bytes, beside: Landing) -> None:
        table = bytes(slab.host.copy for slab in self._slabs if isinstance(slab.host, KeptBuffer))
        slot = min({*OWN} - {each.slot for each in self.staying}) if self._written is None else self._written.slot
        self._write(slot, step, table + small + beside.wait().numpy().tobytes(), self._layout)
        self._written, self._pending = Record(step, slot, table), None

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
            self._erase([self._written.slot])
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
        self._erase(each.slot for each in before if each not in self.staying)

    # Other nodes.

    def end_rounds(self) -> None:
        """Wait for the round under way: training is over."""
        self._learn()  # else some ranks would have begun one, and others not
        wait_for_round()

    def restore(self, step: int, lacking: Sequence[int]) -> None:
        """Have the ranks that lack a step get it from their buddies."""
        buddy = self._buddy
        assert buddy is not None
        if buddy.ward in lacking:
            record = self.of_ward[step]
            buddy.send(buddy.ward, record.table + record.small, self.received[record.slot])
        if buddy.rank in lacking:
            self._erase(OWN)
            table = bytes(len(self._slabs))
            payload = buddy.receive(buddy.buddy, self._places(table))
            self._write(OWN[0], step, table + payload[len(table) :], self._layout)
            self.found = self._records(OWN, self._layout)
        buddy.finish()

    def _round(self, buddy: Buddy, record: Record) -> None:
        """Send a record that stays to the buddy, and get the ward's in the place of the older of two."""
        self._erase([slot := self._next])
        _, payload = self._read(record.slot, self._layout) or (0, b"")
        buddy.send(buddy.buddy, payload, self._places(record.table))
        payload = buddy.receive(buddy.ward, self.received[slot])
        buddy.finish()
        self._write(slot, record.step, payload, buddy.layout_of_ward)
        self._next = sum(WARDS) - slot

    def _places(self, table: bytes) -> list[torch.Tensor]:
        return [self.buffer(number, copy).tensor for number, copy in enumerate(table)]


def _use(slab: Slab, host: HostBuffer, hosts: Sequence[HostBuffer]) -> None:
    slab.host, slab.spares = host, [each for each in hosts if each is not host]
