"""The residency machine, driven by hypothesis in any order, on a model of GPU and host memory.

The model keeps time honest: a copy moves nothing until someone waits for it, and memory that is read too
early or reused too early shows.
"""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bridge_fgo.engine.residency import Residency, ResidencyTracker

LOST = object()


class ModelMemory:
    """One slab whose content is a version number; copies complete when they are waited for."""

    def __init__(self):
        self.gpu = 0
        self.host = LOST
        self.pending = []  # copies in the order in which the hardware ends them

    def start_offload(self):
        assert self.gpu is not LOST, "copy out of memory that was released or not filled yet"
        self.pending.append("out")

    def release(self):
        assert "out" in self.pending or self.host is not LOST
        self._finish("out")
        self.gpu = LOST

    def give_up_offload(self):
        assert self.gpu is not LOST

    def start_reload(self):
        assert self.gpu is LOST, "reload over live states"
        self.pending.append("in")

    def wait_reload(self):
        self._finish("in")

    def _finish(self, kind):
        while kind in self.pending:
            if self.pending.pop(0) == "out":
                self.host = self.gpu
            else:
                self.gpu = self.host


class TrackerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.memory = ModelMemory()
        self.tracker = ResidencyTracker(self.memory)
        self.version = 0

    @rule(times=st.integers(1, 3))
    def offload(self, times):
        for _ in range(times):
            self.tracker.offload()

    @rule(times=st.integers(1, 3))
    def release(self, times):
        for _ in range(times):
            self.tracker.release()

    @rule(times=st.integers(1, 3))
    def reload(self, times):
        for _ in range(times):
            self.tracker.reload()

    @rule()
    def read(self):
        self.tracker.require_readable()
        assert self.memory.gpu == self.version

    @rule()
    def write(self):
        self.tracker.require_writable()
        assert self.memory.gpu == self.version
        self.version += 1
        self.memory.gpu = self.version

    @invariant()
    def released_means_the_host_copy_is_current(self):
        if self.tracker.state is Residency.RELEASED:
            assert self.memory.host == self.version


TestResidencyMachine = TrackerMachine.TestCase
TestResidencyMachine.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


class Recorder:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda: self.calls.append(name)


def test_second_pass_waits_for_the_reload_before_it_offloads():
    recorder = Recorder()
    tracker = ResidencyTracker(recorder)
    for _ in range(2):
        tracker.offload()
        tracker.release()
        tracker.reload()
    one_pass = ["start_offload", "release", "start_reload"]
    assert recorder.calls == [*one_pass, "wait_reload", *one_pass]


def test_release_without_offload_frees_nothing():
    recorder = Recorder()
    ResidencyTracker(recorder).release()
    assert recorder.calls == []


def test_write_during_offload_forbids_the_release():
    recorder = Recorder()
    tracker = ResidencyTracker(recorder)
    tracker.offload()
    tracker.require_writable()
    tracker.release()
    assert recorder.calls == ["start_offload", "give_up_offload"]
    assert tracker.state is Residency.RESIDENT


def test_read_during_offload_does_not_give_it_up():
    recorder = Recorder()
    tracker = ResidencyTracker(recorder)
    tracker.offload()
    tracker.require_readable()
    tracker.release()
    assert recorder.calls == ["start_offload", "release"]


class Interrupted:
    """A mover whose n-th action does not come to its end."""

    def __init__(self, after, error):
        self.left, self.error = after, error

    def __getattr__(self, name):
        def act():
            self.left -= 1
            if self.left == 0:
                raise self.error

        return act


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_what_comes_in_the_midst_of_an_action_leaves_nothing_that_could_be_used(after):
    # Ctrl-C after memory went and before that was noted: the next reader would find nothing behind the tensors.
    tracker = ResidencyTracker(Interrupted(after, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        for verb in (tracker.offload, tracker.release, tracker.reload, tracker.require_readable):
            verb()
    for use in (tracker.offload, tracker.release, tracker.reload, tracker.require_readable, lambda: tracker.state):
        with pytest.raises(RuntimeError, match=r"KeyboardInterrupt came while .* resume from the last checkpoint"):
            use()


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_an_action_that_fails_leaves_the_state_before_it_and_may_be_done_again(after):
    tracker = ResidencyTracker(Interrupted(after, torch.OutOfMemoryError()))
    verbs = [tracker.offload, tracker.release, tracker.reload, tracker.require_readable]
    with pytest.raises(torch.OutOfMemoryError):
        for verb in verbs:
            verb()
    for verb in verbs[after - 1 :]:
        verb()
    assert tracker.state is Residency.RESIDENT


def test_an_error_that_a_handler_raises_as_memory_goes_is_no_failure_to_release():
    # PyTorch raises it from SIGCHLD's handler, at any line, where a worker of a DataLoader has died.
    tracker = ResidencyTracker(Interrupted(2, RuntimeError("DataLoader worker is killed")))
    tracker.offload()
    with pytest.raises(RuntimeError, match="worker"):
        tracker.release()
    with pytest.raises(RuntimeError, match="cannot be used"):
        tracker.require_readable()
