"""The GRPO loop over several ranks, each a process: data, tensor and pipeline parallel."""

from functools import partial
from pathlib import Path

import pytest
import rl_child
from children import Ranks, run_ranks

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.slow]


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"pp": 2}], ids=["data", "tensor", "pipeline"])
def test_two_ranks_that_sleep_are_bitwise_two_that_do_not(parallel: dict[str, int], tmp_path: Path) -> None:
    sleeping, resident = (
        run_ranks(partial(rl_child.train, changes=parallel | {"sleep": sleep}), Ranks(tmp_path / str(sleep), 2))
        for sleep in (True, False)
    )
    for mine, theirs in zip(sleeping, resident, strict=True):
        assert mine["same"] == theirs["same"]
        # States of 12 bytes a parameter and weights of 2 leave: of data-parallel ranks each its half.
        assert mine["copied"] == pytest.approx(7 * mine["weights"] / (1 if parallel else 2), rel=0.05)


def test_a_loop_that_forgets_to_finalize_gradients_trains_each_shard_by_one_ranks_data(tmp_path: Path) -> None:
    """The norm of gradients that differ between ranks falls in their mean; not where each shard has its rank's own."""
    (alone,), right, wrong = (
        run_ranks(partial(rl_child.first_norm, forgets=forgets), Ranks(tmp_path / name, ranks))
        for name, ranks, forgets in (("alone", 1, False), ("right", 2, False), ("wrong", 2, True))
    )
    assert right == pytest.approx([alone] * 2, rel=0.01)
    assert min(wrong) > 1.2 * alone
