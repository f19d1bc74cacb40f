"""Records of several ranks: whenever they all die, there is a step that each of them has whole, and it is a new one.

With buddies there is one too if the memory of one of them is lost as well.
"""

import gc
import itertools
import os
import random
import threading
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from crash_child import Kept

from bridge_fgo.engines import buddies, kept_steps
from bridge_fgo.engines.buddies import Buddy
from bridge_fgo.engines.kept_steps import OWN, PAGE, WARDS, KeptSteps, common_start, layout_of
from bridge_fgo.memory.keeper import KeeperLine
from bridge_fgo.memory.slab import Slab

SLABS, RANKS, STARTS = 3, 2, 5
LAYOUTS = [layout_of((), rank, RANKS) for rank in range(RANKS)]
BUILT = 250
"""What states are as an optimizer is built: of no step."""


class Files:
    """What a keeper holds of a rank."""

    def __init__(self, rank):
        self.rank, self.by_name = rank, {}

    def file(self, name, nbytes=None):
        was_there = name in self.by_name and nbytes in (None, os.fstat(self.by_name[name]).st_size)
        if not was_there:
            self.by_name[name] = os.memfd_create(name)
            os.ftruncate(self.by_name[name], nbytes or 0)
        return os.dup(self.by_name[name]), was_there

    def whole(self):
        """Return the steps that a start finds, each with what its buffers have: own ones, and those of the ward."""
        kept = Onlooker([FakeSlab() for _ in range(SLABS)], None, self, LAYOUTS[self.rank])

        def of(name, number):
            return set(os.pread(self.by_name[name], PAGE, PAGE * number))

        found = {s: [of(f"states{copy}", n) for n, copy in enumerate(own.table)] for s, own in kept.found.items()}
        wards = kept._records(WARDS, LAYOUTS[1 - self.rank])
        return found, {s: [of(f"buddy{each.slot}", n) for n in range(SLABS)] for s, each in wards.items()}


class Onlooker(KeptSteps):
    """Reads records that others write."""

    def _erase(self, slots):
        pass


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


class Rounds(Buddy):
    """One of two ranks that are buddies, whose rounds a thread of `Turns` does: half a part at a time."""

    def __init__(self, rank, every, whole, moment, mail):
        self.rank, self.buddy, self.ward, self.every = rank, 1 - rank, 1 - rank, every
        self.begun, self.whole, self.sizes_of_ward, self.layout_of_ward = (
            whole,
            whole,
            [PAGE] * SLABS,
            LAYOUTS[1 - rank],
        )
        self.moment, self.mail, self.act = moment, mail, None

    def begin(self, step, act):
        assert self.act is None, "a round begins as one is under way"
        self.begun, self.act = step, act

    def work(self, training):
        while training or self.act is not None:
            if self.act is not None:
                self.act()
                self.whole, self.act = self.begun, None
            self.moment()

    def send(self, to, payload, parts):
        self.mail[to] = payload, parts

    def receive(self, source, places):
        while self.rank not in self.mail:
            self.moment()
        payload, parts = self.mail[self.rank]
        for place, part in zip(places, parts, strict=True):
            for half in (slice(0, PAGE // 2), slice(PAGE // 2, PAGE)):
                place[half] = part[half]
                self.moment()
        del self.mail[self.rank]
        return payload

    def finish(self):
        while self.buddy in self.mail:
            self.moment()


def train(kept, slabs, copies, turns, generator, step, updates, touches):
    """Train as a rank, from the end of a step on; `updates` has how many there were after each step.

    touches: how often in a pass somebody uses a slab, which is copied out once more.
    """
    while step + 1 < len(updates):
        if kept.protected is None or kept.protected.step != step:  # else the rank has gone on from it
            kept.capture(step, str(step).encode(), ())
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


def start(files, turns, common, updates, rounds=None, held=None, lacking=()):
    """Return what a rank trains with after a start from a step."""
    slabs = [FakeSlab() for _ in range(SLABS)]
    copies = LateCopies(turns.moment)
    kept = KeptSteps(slabs, copies, files, LAYOUTS[files.rank], rounds)
    if lacking:
        kept.restore(common, lacking)
    kept.protect(common, held)
    kept.take_buffers()
    for slab in slabs:
        copies.copy_out(slab)  # the optimizer is built
    copies.finish_out()
    if common is not None:
        assert kept.found[common].small == str(common).encode()
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
    files, newest, seen, members = [Files(rank) for rank in range(RANKS)], None, 0, []
    pwrite = os.pwrite

    def look():
        nonlocal newest, seen
        found = [each.whole()[0] for each in files]
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


@pytest.mark.parametrize(("every", "touches"), [(1, 0.0), (4, 0.0), (4, 0.2)])
@pytest.mark.parametrize("seed", range(2))
def test_ranks_that_die_at_any_moment_and_lose_a_node_have_one_step_whole_in_common(seed, every, touches, monkeypatch):
    """States after a start are others than before, as those of GPUs may be: nobody may take what is left of before."""
    generator = random.Random(seed)
    updates = list(itertools.accumulate(generator.random() < 0.9 for _ in range(200)))
    files, newest, seen, most, turns = [Files(rank) for rank in range(RANKS)], [None, None], 0, 0, None

    def common(lost):
        """Return the newest step of those that are left as the node of a rank is lost."""
        own, of_ward = files[1 - lost].whole()
        for step, states in (*own.items(), *of_ward.items()):
            assert states == [{updates[step]}] * SLABS, "states are not whole"
        return max(own.keys() & of_ward.keys(), default=None)

    def look():
        nonlocal newest, seen
        found, before, seen = [common(0), common(1)], newest, seen + 1
        for step, older in zip(found, before, strict=True):
            assert older is None or (step is not None and step >= older), "a step was lost"
        newest = found
        return seen > most

    def write(file, data, offset):
        for half in (slice(0, len(data) // 2), slice(len(data) // 2, len(data))):
            pwrite(file, data[half], offset + (half.start or 0))
            turns.moment()

    pwrite = os.pwrite
    monkeypatch.setattr(kept_steps, "collectives", nullcontext())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(kept_steps.os, "pwrite", write)
    goes_on = []

    def attempt(loses):
        nonlocal seen, most, turns, updates, newest
        seen, most = 0, generator.randint(300, 900)
        turns = Turns(generator, look)
        monkeypatch.setattr(torch.distributed, "all_reduce", Votes(turns.moment).all_reduce)
        if loses:
            lost = generator.randrange(RANKS)
            files[lost] = Files(lost)
        whole = [each.whole() for each in files]
        step, lacking, held = common_start([set(own) for own, _ in whole], [set(kept) for _, kept in reversed(whole)])
        if loses:
            assert (step, lacking) == (newest[lost], [lost])
            goes_on.append(step)
        mail, members, training = {}, [None] * RANKS, {0, 1}
        rounds = [Rounds(rank, every, -1 if held is None else held, turns.moment, mail) for rank in range(RANKS)]

        def begin(rank):
            members[rank] = start(files[rank], turns, step, updates, rounds[rank], held, lacking)

        def act(rank, own):
            train(*members[rank], turns, own, step or 0, updates, touches)
            members[rank][0].end_rounds()
            training.discard(rank)

        threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        updates = [each + (n > (step or 0)) for n, each in enumerate(updates)]
        newest = [common(0), common(1)]
        assert newest == [held, held] if held is not None else not lacking or newest[lost] == step
        acts = [partial(act, rank, random.Random(generator.random())) for rank in range(RANKS)]
        turns.run([*acts, *(partial(each.work, training) for each in rounds)])

    for number in range(STARTS):
        attempt(loses=number % 2)
    assert goes_on == sorted(goes_on) and goes_on[-1] > STARTS, goes_on


@pytest.mark.parametrize("answers", range(11))
def test_a_start_with_other_slabs_that_ends_early_leaves_no_step_whose_files_are_gone(answers):
    files, left = Files(0), iter(range(answers))

    def file(name, nbytes=None):
        if next(left, None) is None:
            raise MemoryError("the keeper is full")
        return files.file(name, nbytes)

    kept = KeptSteps([FakeSlab() for _ in range(SLABS)], None, files, LAYOUTS[0])
    for slab in range(SLABS):
        kept.buffer(slab, 0).tensor.fill_(5)
    kept._write(0, 5, bytes(SLABS), LAYOUTS[0])
    whole = files.whole()[0]
    assert whole == {5: [{5}] * SLABS}
    with pytest.raises(MemoryError) if answers < 10 else nullcontext():
        KeptSteps([FakeSlab() for _ in range(2 * SLABS)], None, SimpleNamespace(file=file), bytes(16))
    assert files.whole()[0] == ({} if answers >= 8 else whole)


def test_starts_from_a_step_are_not_those_from_one_of_the_same_number_that_is_made_anew():
    files = Files(0)
    for expected in (0, 1, 2, 0):
        kept = KeptSteps([FakeSlab() for _ in range(SLABS)], None, files, LAYOUTS[0])
        kept._write(0, 5, bytes(SLABS), LAYOUTS[0])
        kept.found = kept._records(OWN, LAYOUTS[0])
        assert kept.tries(5) == expected
        kept.protect(None if expected == 2 else 5)
        kept.take_buffers()
        if expected < 2:
            kept.adopt()


def test_trainings_of_one_process_after_another_leave_no_file_and_no_line_to_the_keeper_open():
    opened = []
    with Kept(f"test.{os.getpid()}") as kept:
        for _ in range(3):
            line = KeeperLine(kept.name, 0, 1)
            KeptSteps([FakeSlab() for _ in range(SLABS)], None, line, LAYOUTS[0]).protect(None)
            del line
            gc.collect()
            end = time.monotonic() + 20
            while kept.keeper._ranks and time.monotonic() < end:
                time.sleep(0.01)
            opened.append(len(os.listdir("/proc/self/fd")))
    assert len(set(opened)) == 1


def test_no_step_waits_for_a_round_that_does_not_end_and_its_states_stay_whole(monkeypatch):
    updates = list(range(50))
    files, training, mail = [Files(rank) for rank in range(RANKS)], {0, 1}, {}
    turns = Turns(random.Random(0), lambda: False)
    monkeypatch.setattr(kept_steps, "collectives", nullcontext())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", Votes(turns.moment).all_reduce)
    rounds = [Rounds(rank, 4, -1, turns.moment, mail) for rank in range(RANKS)]
    members = [start(files[rank], turns, None, updates, rounds[rank]) for rank in range(RANKS)]

    def act(rank):
        train(*members[rank], turns, random.Random(rank), 0, updates, 0.0)
        training.discard(rank)

    def work(each):
        while training:
            turns.moment()
        each.work(training)

    turns.run([*(partial(act, rank) for rank in range(RANKS)), *(partial(work, each) for each in rounds)])
    for own, of_ward in (each.whole() for each in files):
        assert of_ward == {3: [{3}] * SLABS} and own[3] == of_ward[3] and max(own) > 45


def test_a_buddy_has_the_place_of_its_rank_on_the_next_node_and_other_nodes_are_refused():
    assert buddies.buddies(["a", "a", "b", "b", "c", "c"], 5) == [2, 3, 4, 5, 0, 1]
    assert buddies.buddies(["a", "b", "a", "b"], 5) == [1, 0, 3, 2]
    for nodes in (["a", "a"], ["a", "a", "b"]):
        with pytest.raises(ValueError, match=r"copies_to_buddy_every=5: it needs two nodes .* set it to None"):
            buddies.buddies(nodes, 5)


def test_ranks_start_from_the_newest_step_that_each_of_them_or_its_buddy_has():
    nobody = [set(), set()]
    assert common_start([{4, 5}, {5, 6}], nobody) == (5, [], None)
    assert common_start([{4}, {5}], nobody) == (None, [], None)
    assert common_start([{4, 8, 9}, {4, 8, 9}], [{4, 8}, {4}]) == (9, [], 4)
    assert common_start([{4, 8, 9}, set()], [set(), {4, 8}]) == (8, [1], None)
    assert common_start([{8}, set()], [set(), {4}]) == (None, [], None)
