"""The state machine of a slab: which action a verb calls, and what is left of one that ends in an error.

Any order of verbs, with late copies: `engines/test_any_order.py` and `offload/test_stream_order.py`.
"""

from functools import partialmethod

import pytest
import torch

from bridge_fgo.memory.slab import SlabState, SlabStateMachine


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
    for _ in range(2):
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
