"""What ranks do together: they fail alike, and a node is asked for what its ranks need together."""

import gc

import pytest
import torch
from children import Ranks, join_group, run_ranks

from bridge_fgo.engines import ranks
from bridge_fgo.memory.host_memory import Pool


def fails(kind):
    raise kind("the reason")


def seen(act):
    """Return what `act` returns, or the error's type and text."""
    try:
        return act()
    except Exception as error:
        return [type(error).__name__, str(error)]


def run(rank, job):
    """Fail, and ask for host memory, as one of two ranks on a node with 450 bytes free; return each answer or error."""
    join_group(rank, job)
    ranks.pools = lambda: [Pool("host", 1800, 450)]
    return [
        seen(lambda: ranks.on_every_rank(lambda: f"done by {rank}")),
        *(seen(lambda k=k: ranks.on_every_rank(lambda: rank == 1 and fails(k))) for k in (ValueError, OSError)),
        seen(lambda: ranks.require_host_memory([300, 150][rank])),
        seen(lambda: ranks.require_host_memory([300, 151][rank])),
        seen(lambda: ranks.require_host_memory([451, 0][rank])),
        ranks.gather(rank),
    ]


@pytest.mark.slow
def test_two_ranks_fail_alike_and_neither_waits_for_the_other(tmp_path):
    found = run_ranks(run, Ranks(tmp_path / "ranks", 2))
    for rank, (done, value, system, enough, too_little, too_little_for_one, last) in enumerate(found):
        assert done == f"done by {rank}"
        told = "rank 1 failed, and so every rank does: " if rank == 0 else ""
        assert value == ["ValueError", told + "ValueError: " * (rank == 0) + "the reason"]
        assert system == (["RuntimeError", told + "OSError: the reason"] if rank == 0 else ["OSError", "the reason"])
        assert enough is None
        own = f"pins {[300, 151][rank]} bytes of host memory for rank {rank}, 451 for the 2 rank(s) of its node"
        assert too_little[0] == "ValueError" and own in too_little[1]
        assert too_little_for_one[0] == "ValueError" and "451 for the 1 rank(s)" in too_little_for_one[1]
        assert last == [0, 1], "no rank is a collective ahead of the other"


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)


def test_what_a_dropped_optimizer_pins_is_given_back_before_a_refusal(alone, monkeypatch):
    class Dropped:
        def __init__(self):
            self.itself = self

        def __del__(self):
            freed.append(True)

    freed = []
    monkeypatch.setattr(ranks, "pools", lambda: [Pool("host", 100, 80 if freed else 10)])
    Dropped()
    gc.disable()
    try:
        ranks.require_host_memory(10)
        assert not freed
        ranks.require_host_memory(80)
        with pytest.raises(ValueError, match="pins 81 bytes of host memory for rank 0, 81 for the 1 rank"):
            ranks.require_host_memory(81)
    finally:
        gc.enable()


def test_an_interrupted_rank_tells_nobody_and_one_whose_memory_cannot_be_read_tells_it(alone, monkeypatch):
    monkeypatch.setattr(ranks, "gather", lambda own: pytest.fail("nobody else may come"))
    with pytest.raises(KeyboardInterrupt):
        ranks.on_every_rank(lambda: fails(KeyboardInterrupt))
    told = []
    monkeypatch.setattr(ranks, "gather", lambda own: told.append(own) or [own])
    monkeypatch.setattr(ranks, "pools", lambda: fails(RuntimeError))
    with pytest.raises(RuntimeError, match="the reason"):
        ranks.require_host_memory(1)
    assert told == [(None, (False, "RuntimeError: the reason"))]
    ranks.require_host_memory(0)  # nothing to ask for, as where states are in host memory
