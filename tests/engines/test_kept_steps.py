"""Records of several ranks: whenever they all die, there is a step that each of them has whole, and it is a new one."""

import itertools
import os
import random
import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bridge_fgo.engines import kept_steps
from bridge_fgo.engines.kept_steps import PAGE, KeptSteps
from bridge_fgo.memory.slab import Slab

SLABS, RANKS, STARTS = 3, 2, 5
BUILT = 250
"""What states are as an optimizer is built: of no step."""


class Files:
    """What a keeper holds of a rank."""

    def __init__(self):
        self.by_name = {}

    def file(self, name, nbytes=None):
        was_there = name in self.by_name
        if not was_there:
            self.by_name[name] = os.memfd_create(name)
            os.ftruncate(self.by_name[name], nbytes or 0)
        file = self.by_name[name]
        return os.dup(file) if nbytes and nbytes > PAGE else file, was_there  # whose mapping closes it

    def whole(self):
        """Return the steps that a start finds, each with what the buffers that it names have."""
        found = KeptSteps([FakeSlab() for _ in range(SLABS)], None, self, "job").found
        data = os.pread(self.by_name["states"], 2 * SLABS * PAGE, 0) if found else b""
        tables = {step: payload.table for step, (_, payload) in found.items()}
        return {
            step: [set(data[place : place + PAGE]) for place in (PAGE * (n + SLABS * c) for n, c in enumerate(table))]
            for step, table in tables.items()
        }


class FakeSlab:
    """A slab whose every byte is the number of updates that its states have had."""

    own_host, hosts = Slab.own_host, Slab.hosts
    nbytes, states = PAGE, ()

    def __init__(self):
        self.gpu = self.sent = BUILT  # the latter as it was when the newest copy out of it began
        self.host, self.spares, self.least_spares = SimpleNamespace(close=lambda: None), [], 0


class LateCopies:
    """Copies out that are done as something asks for their end, or in `do_one`, in two halves."""

    def __init__(self, moment):
        self.late, self.moment = [], moment

    def copy_out(self, slab):
        slab.own_host()
        slab.sent = slab.gpu
        self.late = [each for each in self.late if each[0] is not slab] + [(slab, slab.host.tensor)]

    def do_one(self):
        slab, host = self.late[0]
        for half in (slice(0, PAGE // 2), slice(PAGE // 2, PAGE)):
            host[half] = slab.gpu
            self.moment()
        self.late.pop(0)

    def has_left(self, slab):
        return all(each is not slab for each, _ in self.late)

    def finish_out(self):
        while self.late:
            self.do_one()


class Turns:
    """Runs functions in threads, one at a time from one moment to the next, and calls `look` between."""

    def __init__(self, generator, look):
        self.generator, self.look, self.stops = generator, look, False
        self.own, self.back, self.errors = threading.local(), threading.Semaphore(0), []

    def moment(self):
        if hasattr(self.own, "turn"):
            self.back.release()
            self.own.turn.acquire()
            if self.stops:
                raise SystemExit

    def run(self, acts):
        """Run until all have returned, or `look` returns True: then all die where they are."""
        turns = {number: threading.Semaphore(0) for number in range(len(acts))}
        threads = [threading.Thread(target=self._run, args=(act, n, turns), daemon=True) for n, act in enumerate(acts)]
        for thread in threads:
            thread.start()
        while turns:
            self.stops = self.stops or bool(self.errors) or self.look()
            turns[self.generator.choice(list(turns))].release()
            self.back.acquire()
        for thread in threads:
            thread.join()
        assert not self.errors, self.errors

    def _run(self, act, number, turns):
        self.own.turn = turns[number]
        self.own.turn.acquire()
        try:
            if not self.stops:
                act()
        except SystemExit:
            pass
        except BaseException as error:
            self.errors.append(error)
        finally:
            del turns[number]
            self.back.release()


class Votes:
    """The all-reduce of all ranks: what it tells is known once the last has voted."""

    def __init__(self, moment):
        self.moment, self.cast = moment, []

    def all_reduce(self, ballot, _):
        first = len(self.cast) // RANKS * RANKS
        self.cast.append(ballot.tolist())
        while len(self.cast) < first + RANKS:
            self.moment()
        ballot.copy_(torch.tensor(self.cast[first : first + RANKS]).amin(dim=0))


def train(kept, slabs, copies, turns, generator, step, updates, touches):
    """Train as a rank, from the end of a step on; `updates` has how many there were after each step.

    touches: how often in a pass somebody uses a slab, which is copied out once more.
    """
    while step + 1 < len(updates):
        kept.capture(step, b"", lambda step=step: {"step": step}, ())
        for slab in slabs:  # the pass begins; what is on the host already may be copied once more
            if slab.sent != slab.gpu or generator.random() < 0.3:
                copies.copy_out(slab)
            turns.moment()
        kept.poll()
        for _ in range(generator.randrange(2 * SLABS)):
            if copies.late:
                copies.do_one()
            kept.poll()
        if generator.random() < touches:
            kept.settle()
            copies.copy_out(generator.choice(slabs))
        kept.settle()
        kept.vote(torch.device("cpu"))
        step += 1
        for slab in slabs if updates[step] != updates[step - 1] else ():
            kept.settle()  # as `require_writable` does
            slab.gpu = updates[step]
            if generator.random() < 0.5:
                copies.copy_out(slab)
            turns.moment()


def start(files, turns, common, updates):
    """Return what a rank trains with after a start from a step."""
    slabs = [FakeSlab() for _ in range(SLABS)]
    copies = LateCopies(turns.moment)
    kept = KeptSteps(slabs, copies, files, "job")
    kept.take_buffers(common)
    for slab in slabs:
        copies.copy_out(slab)  # the optimizer is built
    copies.finish_out()
    if common is not None:
        assert kept.small_state() == ({"step": common}, b"")
        kept.adopt()
    for slab in slabs:
        slab.gpu = slab.sent = updates[common or 0]
        if common is None:
            slab.sent = BUILT
    return kept, slabs, copies


@pytest.mark.parametrize("touches", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_die_at_any_moment_have_one_step_whole_in_common(seed, touches, monkeypatch):
    generator = random.Random(seed)
    updates = list(itertools.accumulate(generator.random() < 0.9 for _ in range(200)))
    files, newest, seen, members = [Files() for _ in range(RANKS)], None, 0, []
    pwrite = os.pwrite

    def look():
        nonlocal newest, seen
        found = [each.whole() for each in files]
        common = max(set.intersection(*map(set, found)), default=None)
        if common is not None:
            assert [each[common] for each in found] == [[{updates[common]}] * SLABS] * RANKS, "states are not whole"
            assert newest is None or touches or common >= newest, "a step was lost"
            assert touches or all(max(each) <= common + 1 for each in found), "ranks differ by more than a step"
        else:
            assert newest is None or (touches and not any(kept.protected for kept, *_ in members)), "no step is left"
        newest, seen = common, seen + 1
        return seen > most

    def write(file, data, offset):
        for half in (slice(0, len(data) // 2), slice(len(data) // 2, len(data))):
            pwrite(file, data[half], offset + (half.start or 0))
            turns.moment()

    monkeypatch.setattr(kept_steps, "collectives", nullcontext())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(kept_steps.os, "pwrite", write)
    for _ in range(STARTS):
        seen, most = 0, generator.randint(50, 500)
        turns = Turns(generator, look)
        monkeypatch.setattr(torch.distributed, "all_reduce", Votes(turns.moment).all_reduce)
        members = [start(each, turns, newest, updates) for each in files]
        own = [random.Random(generator.random()) for _ in members]
        begin = newest or 0
        acts = [partial(train, *m, turns, r, begin, updates, touches) for m, r in zip(members, own, strict=True)]
        turns.run(acts)
    assert newest > STARTS
