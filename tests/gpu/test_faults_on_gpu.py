"""If one of two ranks is killed or fails, training ends and resumes bitwise."""

from pathlib import Path

import pytest
from changed_arm import POINTS
from gpu_lane import PACKED, assert_same_shards, needs_gpus, saving_arm

from harness.arms import runner

RAN_ON = "two H200"


def newest(folder: Path) -> Path:
    """Returns the checkpoint that Bridge would resume from."""
    return folder / f"iter_{int((folder / 'latest_checkpointed_iteration.txt').read_text()):07d}"


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory):
    """A resident run of two ranks, and its folder of checkpoints."""
    needs_gpus(2)
    folder = tmp_path_factory.mktemp("resident")
    return saving_arm(
        "resident", folder, 2, *PACKED, "--offload", "off", "--save", str(folder / "kept")
    ), folder / "kept"


CASES = [(point, "kill") for point in POINTS] + [
    (point, "fail") for point in ("a_piece_of_a_copy", "a_copy_out", "a_copy_in", "a_release")
]


@pytest.mark.gpu
@pytest.mark.parametrize(("point", "kind"), CASES, ids=["-".join(case) for case in CASES])
def test_a_run_that_lost_a_rank_ends_and_resumes_bitwise(resident, tmp_path: Path, point, kind) -> None:
    kept = tmp_path / "kept"
    options = ("--offload", "on", "--save", str(kept), f"FAULT={point},6,{kind},1")
    with pytest.raises(runner.ArmFailed, match="exit status"):
        saving_arm("failed", tmp_path, 2, *PACKED, *options)
    if kind == "fail":
        assert f"RuntimeError: injected: {point}" in (tmp_path / "failed.log").read_text()
    assert newest(kept).name == "iter_0000004"
    assert_same_shards(newest(kept), resident[1] / "iter_0000004")
    if point in ("the_update_of_a_part", "a_state_is_handed_to_a_checkpoint"):
        resumed = saving_arm("resumed", tmp_path, 2, *PACKED, "--offload", "on", "--load", str(kept))
        assert resumed.result["digests"] == resident[0].result["digests"]
