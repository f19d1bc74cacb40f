"""A rank that is killed, or an operation that fails, at any point of a step or a save: the last checkpoint stands."""

from __future__ import annotations

import signal
from pathlib import Path

import children
import fault_child
import pytest
from test_checkpoints import assert_same_shards, resumed

pytestmark = pytest.mark.usefixtures("cpu_standins")

PATIENCE = 120
"""Seconds that a child may take; it takes some five."""


def run(folder: Path, point: str | None = None, call: int = 1, kill: bool = False) -> int:
    """Run a child to its end; return its exit status, negative where a signal ended it."""
    child = children.start(fault_child.train, str(folder), point, call, kill)
    return children.join(child, PATIENCE, f"at {point}")


@pytest.fixture(scope="module")
def resident(cpu_standins, tmp_path_factory):
    """The folder of a resident run's checkpoint, and the digests of a resident run that resumed from it."""
    folder = tmp_path_factory.mktemp("resident")
    assert run(folder) == 0
    return folder, resumed(folder, False)


def newest(folder: Path) -> Path:
    """The checkpoint that Bridge would resume from."""
    return folder / f"iter_{int((folder / 'latest_checkpointed_iteration.txt').read_text()):07d}"


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "failed"])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("point", fault_child.POINTS)
def test_the_last_checkpoint_stands(resident, tmp_path, point, call, kill):
    status = run(tmp_path, point, call, kill)
    once_a_step = point in ("the offload begins", "memory goes", "the reload begins")
    if once_a_step and call > 1:
        assert status == 0  # nothing broke: the second checkpoint is there
        assert newest(tmp_path).name == f"iter_{fault_child.SAVED_AFTER + 1:07d}"
        return
    assert status == (-signal.SIGKILL if kill else 3)
    assert newest(tmp_path).name == f"iter_{fault_child.SAVED_AFTER:07d}"
    assert_same_shards(newest(tmp_path), newest(resident[0]))


@pytest.mark.parametrize("point", ["the update of a part", "a state is handed to a checkpoint"])
def test_a_killed_run_resumes_bitwise(resident, tmp_path, point):
    assert run(tmp_path, point, call=2, kill=True) == -signal.SIGKILL
    assert resumed(tmp_path, True) == resident[1]
