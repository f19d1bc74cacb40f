"""Real workers of NVRx and mcore save while the trainer sleeps.

    pytest -m gpu -s tests/gpu/test_saves_on_gpu.py

What was measured is printed (`-s`). Without a GPU `python tests/gpu/phases_arm.py --sleep saved --strategy mcore` runs
an arm with a tiny model on the CPU.
"""

import pytest
from gpu_lane import LEAST_RETURNED, NEEDS_CUDA, printed

RAN_ON = "one H200"

pytestmark = NEEDS_CUDA


@pytest.mark.parametrize(
    "options",
    [
        ("--strategy", "nvrx", "--constant-structure"),
        ("--strategy", "nvrx"),
        ("--strategy", "mcore", "--constant-structure"),
    ],
    ids=["nvrx-constant_structure", "nvrx", "mcore-constant_structure"],
)
def test_each_save_has_the_bytes_of_its_step_and_a_sleep_gets_all_memory_while_it_is_written(
    options: tuple[str, ...],
) -> None:
    run = printed("phases_arm", "--sleep", "saved", "--layers", "8", *options)
    for sleep in run["sleeps"]:
        print(sleep)
    print(f"{run['tensors']} tensors a save, stale: {run['stale']}, {run['warnings']}")
    assert run["tensors"] and run["stale"] == {"3": [], "6": [], "9": []}
    assert not run["warnings"]
    whole = 18 * run["parameters"]
    for sleep in run["sleeps"]:
        assert sleep["returned"] >= LEAST_RETURNED * whole
        assert sleep["stays"]["allocated"] + sleep["stays"]["cached"] <= (1 - LEAST_RETURNED) * whole
