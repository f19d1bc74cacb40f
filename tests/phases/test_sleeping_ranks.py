"""Two data-parallel ranks, each a process, copy their own shards and all-gather the others'."""

from __future__ import annotations

import json

import children
import pytest
import rank_child

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.slow]


def run(folder, sleeps, changes):
    folder.mkdir()
    job = rank_child.Job(folder, 2, sleeps, None, steps=3)
    started = [children.start(rank_child.train_and_sleep, rank, job, changes) for rank in range(2)]
    assert [children.join(child, "as one of 2 ranks") for child in started] == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("changes", [{}, {"overlap_grad_reduce": True, "overlap_param_gather": True, "experts": True}])
def test_two_ranks_that_sleep_are_bitwise_resident_ones_and_copy_half_the_weights_each(tmp_path, changes):
    resident, sleeping = (run(tmp_path / str(sleeps), sleeps, changes) for sleeps in (False, True))
    for mine, theirs in zip(sleeping, resident, strict=True):
        assert mine["numbers"] == theirs["numbers"] and mine["digests"] == theirs["digests"]
        (_, wake, _), *later = mine["copied"]
        assert mine["copied"][0][0] == 0  # told by the masters
        for out, alone, again in later:
            assert 2 * out == 2 * alone == wake and again == 0
