"""The state machine of a slab, driven by hypothesis in any order, on a model of GPU and host memory.

The model keeps time honest: a copy moves nothing until someone waits for it, and memory that is read too
early or reused too early shows.
"""

from functools import partialmethod

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bridge_fgo.memory.slab import SlabState, SlabStateMachine

LOST = object()


class Recorder(SlabStateMachine):
    """Actions that do nothing but tell their names, in `calls`, and check that they are called where they are valid."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def _act(self, name, valid_in):
        assert self.state is valid_in, f"{name} where it is {self.state}"
        self.calls.append(name)
        self.end_action()

    def end_action(self):
        pass

    _start_offload = partialmethod(_act, "start_offload", SlabState.RESIDENT)
    _release = partialmethod(_act, "release", SlabState.OFFLOADING)
    _give_up_offload = partialmethod(_act, "give_up_offload", SlabState.OFFLOADING)
    _start_reload = partialmethod(_act, "start_reload", SlabState.RELEASED)
    _wait_reload = partialmethod(_act, "wait_reload", SlabState.RELOADING)


class ModelSlab(Recorder):
    """A slab whose content is a version number; copies complete when they are waited for."""

    def __init__(self):
        super().__init__()
        self.gpu = 0
        self.host = LOST
        self.pending = []  # copies in the order in which the hardware ends them

    def _start_offload(self):
        super()._start_offload()
        assert self.gpu is not LOST, "copy out of memory that was released or not filled yet"
        self.pending.append(("out", self.gpu))

    def _release(self):
        super()._release()
        assert ("out", self.gpu) in self.pending or self.host is not LOST
        self._finish("out")
        self.gpu = LOST

    def _give_up_offload(self):
        super()._give_up_offload()
        assert self.gpu is not LOST

    def _start_reload(self):
        super()._start_reload()
        assert self.gpu is LOST, "reload over live states"
        self.pending.append(("in", self.host))

    def _wait_reload(self):
        super()._wait_reload()
        self._finish("in")

    def _finish(self, kind):
        while any(copy == kind for copy, _ in self.pending):
            copy, version = self.pending.pop(0)
            if copy == "in":
                self.gpu = version
            else:
                self.host = version if self.gpu == version else LOST  # what was written meanwhile tears it


class AnyOrderOfTheFiveVerbs(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.slab = ModelSlab()
        self.version = 0

    @rule(verb=st.sampled_from(["offload", "release", "reload", "require_readable"]), times=st.integers(1, 3))
    def move(self, verb, times):
        for _ in range(times):
            getattr(self.slab, verb)()
            if verb == "require_readable":
                assert self.slab.gpu == self.version

    @rule()
    def write(self):
        self.slab.require_writable()
        assert self.slab.gpu == self.version
        self.version += 1
        self.slab.gpu = self.version

    @invariant()
    def released_means_the_host_copy_is_current(self):
        if self.slab.state is SlabState.RELEASED:
            assert self.slab.host == self.version


TestAnyOrderOfTheFiveVerbs = AnyOrderOfTheFiveVerbs.TestCase
TestAnyOrderOfTheFiveVerbs.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_read_does_not_give_up_an_offload_and_a_start_handed_in_takes_the_place_of_the_slabs_own():
    machine = Recorder()
    for verb in (machine.offload, machine.require_readable, machine.release):
        verb()
    assert machine.calls == ["start_offload", "release"]

    machine = Recorder()
    another = lambda: machine.calls.append("another start")  # noqa: E731
    machine.offload(another)
    machine.offload(another)  # on its way already
    machine.release()
    machine.offload(another)  # gone already
    machine.reload()
    machine.offload(another)
    assert machine.calls == ["another start", "release", "start_reload", "wait_reload", "another start"]


class Interrupted(Recorder):
    """A machine whose n-th action does not come to its end."""

    def __init__(self, after, error):
        super().__init__()
        self.left, self.error = after, error

    def end_action(self):
        self.left -= 1
        if self.left == 0:
            raise self.error


def verbs_of(machine):
    return [machine.offload, machine.release, machine.reload, machine.require_readable]


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_what_comes_in_the_midst_of_an_action_leaves_nothing_that_could_be_used(after):
    # Ctrl-C after memory went and before that was noted: the next reader would find nothing behind the tensors.
    machine = Interrupted(after, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        for verb in verbs_of(machine):
            verb()
    for use in (*verbs_of(machine), machine.require_writable, lambda: machine.state):
        with pytest.raises(RuntimeError, match=r"KeyboardInterrupt came while .* resume from the last checkpoint"):
            use()
    assert len(machine.calls) == after


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_an_action_that_fails_leaves_the_state_before_it_and_may_be_done_again(after):
    machine = Interrupted(after, torch.OutOfMemoryError())
    verbs = verbs_of(machine)
    with pytest.raises(torch.OutOfMemoryError):
        for verb in verbs:
            verb()
    for verb in verbs[after - 1 :]:
        verb()
    assert machine.state is SlabState.RESIDENT


def test_an_offload_that_was_not_given_up_goes_on_and_an_error_of_a_handler_is_no_failure_to_release():
    machine = Interrupted(2, torch.OutOfMemoryError())
    machine.offload()
    with pytest.raises(torch.OutOfMemoryError):
        machine.require_writable()
    assert machine.state is SlabState.OFFLOADING
    machine.require_writable()
    assert machine.state is SlabState.RESIDENT
    # PyTorch raises it from SIGCHLD's handler, at any line, where a worker of a DataLoader has died.
    machine = Interrupted(2, RuntimeError("DataLoader worker is killed"))
    machine.offload()
    with pytest.raises(RuntimeError, match="worker"):
        machine.release()
    with pytest.raises(RuntimeError, match="cannot be used"):
        machine.require_readable()
