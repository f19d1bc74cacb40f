"""One of two ranks is killed in a save: the other ends, the last checkpoint is whole, both train on from it bitwise."""

from __future__ import annotations

import functools
import signal

import children
import pytest
from fault_child import FSDP_OPTIONS, SAVED_AFTER_EACH, train_as_rank
from rank_child import Job
from saving import newest
from test_checkpoints import assert_same_shards
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.slow]

NONE, PART, WHOLE, DESCRIBED = range(4)
"""How far the killed save had come: no byte of the rank's shard, a part of it, the whole, or the metadata too."""


@pytest.fixture(scope="module")
def unbroken(cpu_standins, tmp_path_factory):
    """A function that trains two resident ranks to their end, once for each model.

    It returns the folder of their checkpoints, and each rank's losses, gradient norms and digests.
    """

    @functools.cache
    def make(*changes):
        folder = tmp_path_factory.mktemp("unbroken")
        return folder / "saves", run(folder / "ranks", False, dict(changes), folder / "saves")

    return make


def run(folder, offload, changes, saves):
    """Run both ranks to their end, from the last checkpoint in `saves`; return what each saw."""
    saves.mkdir(exist_ok=True)
    return children.run_ranks(functools.partial(train_as_rank, saves=saves), Job(folder, 2, offload, None, 0, changes))


def run_into(killed, folder, changes, saves):
    """Run both ranks, of which one is killed; return the error by which the other ended by itself."""
    folder.mkdir()
    saves.mkdir()
    job = Job(folder, 2, True, None, 0, changes)
    started = [children.start(train_as_rank, rank, job, saves, killed) for rank in range(2)]
    status = {rank: children.join(child, f"as rank {rank} of {killed}") for rank, child in enumerate(started)}
    other = 1 - killed[0]
    assert status == {killed[0]: -signal.SIGKILL, other: 1}
    return (folder / f"{other}.error").read_text()


def left_by(rank, checkpoint, whole):
    """Return what the killed save has left of a rank's shard.

    whole: the same checkpoint of a run that nothing broke.
    """
    if (checkpoint / ".metadata").exists():
        assert_same_shards(checkpoint, whole)
        return DESCRIBED
    ours, theirs = (folder / f"__{rank}_0.distcp" for folder in (checkpoint, whole))
    if not ours.exists():
        return NONE
    found, expected = ours.read_bytes(), theirs.read_bytes()
    assert expected.startswith(found)
    return WHOLE if found == expected else PART


def tensor_bytes(checkpoint):
    """Return the bytes on disk of every part of a tensor. What mcore pickles beside them differs once it was loaded."""
    metadata, found = FileSystemReader(checkpoint).read_metadata(), {}
    for part, place in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[part.fqn], TensorStorageMetadata):
            file = (checkpoint / place.relative_path).read_bytes()
            found[part.fqn, part.offset] = file[place.offset : place.offset + place.length]
    assert len(found) > 20
    return found


@pytest.mark.parametrize(
    ("changes", "killed", "left"),
    [
        pytest.param(FSDP_OPTIONS, (1, "the entries are made", 1), NONE, id="fsdp-before its shard"),
        pytest.param(FSDP_OPTIONS, (1, "an entry is written", 20), PART, id="fsdp-in its shard"),
        pytest.param(FSDP_OPTIONS, (1, "ranks gather", 2), WHOLE, id="fsdp-before it tells of its shard"),
        pytest.param(FSDP_OPTIONS, (0, "the checkpoint is named", 1), DESCRIBED, id="fsdp-before the name"),
        pytest.param({}, (1, "an entry of torch_dist is written", 10), PART, id="distributed optimizer-in its shard"),
    ],
)
def test_ranks_of_which_one_is_killed_in_a_save_resume_from_the_last_checkpoint(
    unbroken, tmp_path, changes, killed, left
):
    theirs, resident = unbroken(*changes.items())
    saves, (first, second) = tmp_path / "saves", (f"iter_{step:07d}" for step in SAVED_AFTER_EACH)
    assert "peer" in run_into(killed, tmp_path / "killed", changes, saves)
    assert newest(saves).name == first
    assert left_by(killed[0], saves / second, theirs / second) == left
    assert_same_shards(saves / first, theirs / first)
    for seen, expected in zip(run(tmp_path / "resumed", True, changes, saves), resident, strict=True):
        to_come = {number: each for number, each in expected["numbers"].items() if int(number) > SAVED_AFTER_EACH[0]}
        assert seen["numbers"] == to_come != {}
        assert seen["digests"] == expected["digests"]
    # The resumed ranks have saved that step again, over the files of the killed save.
    assert tensor_bytes(saves / second) == tensor_bytes(theirs / second)
