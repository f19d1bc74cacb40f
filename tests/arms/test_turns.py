"""The turnstile, without a process of its own: ranks are threads."""

import contextlib
import threading

import pytest

from bridge_fgo.tools.arms.turns import Turnstile, TurnTaker


@pytest.fixture
def make(tmp_path):
    """Returns what makes the turnstile of an arm, and its address."""
    with contextlib.ExitStack() as stack:

        def make(name="arm"):
            turnstile = stack.enter_context(contextlib.closing(Turnstile(tmp_path / name)))
            return turnstile, tmp_path / name

        yield make


def start(address, rank, ranks, taken):
    def run():
        taker = TurnTaker(address, ranks)
        try:
            while True:
                if not taker.has_another_step():
                    taker.take()
                taken.append((rank, taker.turn))
        except ConnectionError:
            taken.append((rank, "end"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def until(turnstile, is_so):
    for _ in range(500):
        if turnstile.is_awaited is is_so:
            return
        turnstile.poll(0.01)
    raise AssertionError("it did not come to be so")


def test_no_rank_steps_before_all_ranks_of_its_arm_wait_and_they_get_their_turn_together(make):
    (turnstile, address), taken = make(), []
    start(address, 0, 2, taken)
    for _ in range(20):
        turnstile.poll(0.01)
    assert not turnstile.is_awaited and taken == []
    start(address, 1, 2, taken)
    until(turnstile, True)
    turnstile.grant(3, 2)
    assert not turnstile.is_awaited
    until(turnstile, True)
    assert sorted(taken) == [(0, 3)] * 2 + [(1, 3)] * 2


def test_a_rank_that_is_gone_waits_no_more_and_a_waiting_one_ends_with_an_error_as_the_turnstile_does(make):
    (turnstile, address), (other, of_other) = make(), make("other")
    start(of_other, 0, 1, [])
    taker = TurnTaker(address, 1)
    taker._connection.send(1)
    until(turnstile, True)
    until(other, True)
    taker._connection.close()
    until(turnstile, False)
    assert other.is_awaited
    (turnstile, address), taken = make("third"), []
    thread = start(address, 0, 1, taken)
    until(turnstile, True)
    turnstile.close()
    thread.join(5)
    assert taken == [(0, "end")]
