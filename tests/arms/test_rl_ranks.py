"""The GRPO loop over several ranks, each a process: data, tensor and pipeline parallel."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import pytest
import rl_child

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.slow]


def run(act: Callable[..., None], ranks: int, folder: Path, *args: Any) -> list[Any]:
    folder.mkdir()
    started = [children.start(act, rank, ranks, folder, *args) for rank in range(ranks)]
    assert [children.join(child, f"as one of {ranks} ranks") for child in started] == [0] * ranks
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"pp": 2}], ids=["data", "tensor", "pipeline"])
def test_two_ranks_that_sleep_are_bitwise_two_that_do_not(parallel: dict[str, int], tmp_path: Path) -> None:
    sleeping, resident = (
        run(rl_child.train, 2, tmp_path / str(sleep), parallel | {"sleep": sleep}) for sleep in (True, False)
    )
    for mine, theirs in zip(sleeping, resident, strict=True):
        assert mine["same"] == theirs["same"]
        # States of 12 bytes a parameter and weights of 2 leave: of data-parallel ranks each its half.
        assert mine["copied"] == pytest.approx(7 * mine["weights"] / (1 if parallel else 2), rel=0.05)


def test_a_loop_that_forgets_to_finalize_gradients_trains_each_shard_by_one_ranks_data(tmp_path: Path) -> None:
    """The norm of gradients that differ between ranks falls in their mean; not where each shard has its rank's own."""
    (alone,) = run(rl_child.first_norm, 1, tmp_path / "alone", False)
    right, wrong = (run(rl_child.first_norm, 2, tmp_path / str(forgets), forgets) for forgets in (False, True))
    assert right == pytest.approx([alone] * 2, rel=0.01)
    assert min(wrong) > 1.2 * alone
