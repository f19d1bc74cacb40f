"""The turnstile, without a process of its own: ranks are threads."""

import threading

import pytest

from bridge_fgo.tools.arms.turns import Turnstile, TurnTaker


@pytest.fixture
def turnstile():
    with Turnstile() as turnstile:
        yield turnstile


def start(address, rank, ranks, taken):
    def run():
        taker = TurnTaker(address, rank, ranks)
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
        if is_so():
            return
        turnstile.poll(0.01)
    raise AssertionError("it did not come to be so")


def test_no_rank_steps_before_all_ranks_of_its_arm_wait_and_they_get_their_turn_together(turnstile):
    address, taken = turnstile.add("arm"), []
    start(address, 0, 2, taken)
    for _ in range(20):
        turnstile.poll(0.01)
    assert not turnstile.is_waiting("arm") and taken == []
    start(address, 1, 2, taken)
    until(turnstile, lambda: turnstile.is_waiting("arm"))
    turnstile.grant("arm", 3, 2)
    assert not turnstile.is_waiting("arm")
    until(turnstile, lambda: turnstile.is_waiting("arm"))
    assert sorted(taken) == [(0, 3)] * 2 + [(1, 3)] * 2


def test_a_rank_that_is_gone_does_not_wait_any_more(turnstile):
    address = turnstile.add("arm")
    other = turnstile.add("other")
    taken = []
    start(other, 0, 1, taken)
    taker = TurnTaker(address, 0, 1)
    taker._connection.send(taker._asks)
    until(turnstile, lambda: turnstile.is_waiting("arm") and turnstile.is_waiting("other"))
    taker._connection.close()
    until(turnstile, lambda: not turnstile.is_waiting("arm"))
    assert turnstile.is_waiting("other")


def test_a_waiting_rank_ends_with_an_error_where_the_turnstile_ends():
    taken = []
    with Turnstile() as turnstile:
        thread = start(turnstile.add("arm"), 0, 1, taken)
        until(turnstile, lambda: turnstile.is_waiting("arm"))
    thread.join(5)
    assert taken == [(0, "end")]
