"""If one rank is killed or fails, all end and resume bitwise."""

import datetime
import functools
import signal

import children
import pytest
from fault_child import (
    ATTACHING,
    CONTEXTS,
    ENDING,
    FSDP_OPTIONS,
    LOCAL,
    PARALLEL,
    SAVED_AFTER_EACH,
    VERBS,
    fail_at_each_place,
    fail_in_a_block,
    fail_with_the_flag,
    train_as_rank,
)
from rank_child import Job, run_both
from saving import assert_same_shards, newest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from bridge_fgo.sleep.moved import KINDS

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.slow]

NONE, PART, WHOLE, DESCRIBED = range(4)
"""How far the killed save had come: no byte of the rank's shard, a part of it, the whole, or the metadata too."""


@pytest.fixture(scope="module")
def unbroken(cpu_standins, tmp_path_factory):
    """A function that trains resident ranks to their end, once for each model.

    It returns the folder of their checkpoints, and each rank's losses, gradient norms and digests.
    """

    @functools.cache
    def make(ranks, *changes):
        folder = tmp_path_factory.mktemp("unbroken")
        return folder / "saves", run(folder / "ranks", ranks, False, dict(changes), folder / "saves")

    return make


def run(folder, ranks, offload, changes, saves):
    """Run the ranks to their end, from the last checkpoint in `saves`; return what each saw."""
    saves.mkdir(exist_ok=True)
    job = Job(folder, ranks, offload, None, 0, changes)
    return children.run_ranks(functools.partial(train_as_rank, saves=saves), job)


def run_into(killed, folder, ranks, changes, saves):
    """Run the ranks, of which one is killed; the error by which the other ended by itself is gloo's."""
    folder.mkdir()
    saves.mkdir()
    job = Job(folder, ranks, True, None, 0, changes)
    started = [children.start(children.leave_what, train_as_rank, rank, job, saves, killed) for rank in range(ranks)]
    status = {rank: children.join(child, f"as rank {rank} of {killed}") for rank, child in enumerate(started)}
    assert status == {rank: -signal.SIGKILL if rank == killed[0] else 1 for rank in range(ranks)}
    errors = [error.read_text() for error in folder.glob("*.error")]
    assert len(errors) == ranks - 1 and all("peer" in error for error in errors)


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


LAST = "the config is written"
"""The one point at which the second checkpoint is whole and named."""
OF_ONE_RANK = [
    ("the entries are made", 1, NONE),
    ("a state is handed to a checkpoint", 1, None),
    ("a state is handed to a checkpoint", 7, None),
    ("an entry is written", 1, None),
    ("an entry is written", 40, PART),
    ("the metadata is written", 1, WHOLE),
    ("the checkpoint is named", 1, DESCRIBED),
    (LAST, 1, DESCRIBED),
]


@pytest.mark.parametrize(
    ("changes", "ranks", "killed", "left"),
    [
        *[pytest.param(FSDP_OPTIONS, 1, (0, *how), left, id=f"{how}") for *how, left in OF_ONE_RANK],
        pytest.param(FSDP_OPTIONS, 2, (1, "the entries are made", 1), NONE, id="fsdp-before its shard"),
        pytest.param(FSDP_OPTIONS, 2, (1, "an entry is written", 20), PART, id="fsdp-in its shard"),
        pytest.param(FSDP_OPTIONS, 2, (1, "ranks gather", 2), WHOLE, id="fsdp-before it tells of its shard"),
        pytest.param(FSDP_OPTIONS, 2, (0, "the checkpoint is named", 1), DESCRIBED, id="fsdp-before the name"),
        pytest.param({}, 2, (1, "an entry of torch_dist is written", 10), PART, id="distributed optimizer"),
    ],
)
def test_ranks_of_which_one_is_killed_in_a_save_resume_from_the_last_whole_checkpoint_bitwise(
    unbroken, tmp_path, changes, ranks, killed, left
):
    theirs, resident = unbroken(ranks, *changes.items())
    saves, (first, second) = tmp_path / "saves", (f"iter_{step:07d}" for step in SAVED_AFTER_EACH)
    run_into(killed, tmp_path / "killed", ranks, changes, saves)
    assert newest(saves).name == (second if killed[1] == LAST else first)
    assert left is None or left_by(killed[0], saves / second, theirs / second) == left
    assert_same_shards(saves / first, theirs / first)
    began = SAVED_AFTER_EACH[killed[1] == LAST]
    for seen, expected in zip(run(tmp_path / "resumed", ranks, True, changes, saves), resident, strict=True):
        assert seen["began"] == began
        assert seen["numbers"] == expected["numbers"][began:] != []
        assert seen["digests"] == expected["digests"]
    # The resumed ranks have saved that step again, over the files of the killed save.
    assert tensor_bytes(saves / second) == tensor_bytes(theirs / second)
    if ranks == 1:
        assert_same_shards(saves / second, theirs / second)


SOON = datetime.timedelta(seconds=20)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_what_fails_on_one_rank_in_a_verb_fails_on_all_of_them_and_all_can_be_brought_back(tmp_path, parallel):
    job = Job(tmp_path / "ranks", 2, True, None, 1, PARALLEL[parallel], timeout=SOON)
    others, failing = children.run_ranks(fail_at_each_place, job)
    reached = {}
    for (verb, _, theirs), (_, place, own) in zip(others, failing, strict=True):
        if own is None:  # it is called the first time only
            assert theirs is None
            continue
        assert own == f"StillShared: in {place}"
        assert theirs == (None if verb in LOCAL else f"RuntimeError: rank 1 failed, and so every rank does: {own}")
        reached.setdefault(verb, set()).add(place)
    assert reached.keys() == {"making one", *VERBS}
    if parallel == "DP":  # where all places are tried
        assert {"Rounding.agrees", "Transfers.copy_out", "StorageSlab.empty"} <= reached["offload"]
        assert {"StorageSlab.copy_out", "StorageSlab.map_host"} <= reached["offload, gradients kept"]
        assert {"StateOffloader.round_again", "Transfers.copy_in", "StateOffloader.finish_reload"} <= reached["reload"]
        assert {"WeightSet.__init__", "StorageSlab.copy_out"} <= reached["keep"]
        assert {"NativeEngine.close", "Slab.close"} <= reached["close"]
        swap_out = {f"WeightSets._swap_out.<locals>.{name}" for name in ("swap", "end")}
        assert {"WeightSets._copy_in", *swap_out} <= reached["weights, awake"]


def contexts(turns):
    """Return pairs of a context and a parallelism: of every three of a context, those whose turn it is."""
    pairs = [(i + j, context, parallel) for i, context in enumerate(CONTEXTS) for j, parallel in enumerate(PARALLEL)]
    return [(context, parallel) for number, context, parallel in pairs if number % len(PARALLEL) in turns]


@pytest.mark.parametrize(("context", "parallel"), contexts(turns=(0, 1)))
def test_no_rank_waits_for_one_whose_block_has_raised_and_its_own_error_is_seen(tmp_path, context, parallel):
    job = Job(tmp_path / "ranks", 2, True, None, 2, PARALLEL[parallel], timeout=SOON)
    others, failing = children.run_ranks(functools.partial(fail_in_a_block, context=context, alone=True), job)
    assert failing["error"] == "Injected('in the block')"
    assert "peer" in others["error"]
    assert max(failing["took"], others["took"]) < SOON.total_seconds()
    left = [note for note in failing["notes"] if "stay off the GPU" in note]
    stays = {"training_step": ["optimizer"], "weights": ["params"]}.get(context, sorted(KINDS))
    assert failing["away"] == stays and len(failing["notes"]) == len(left) == (context in ("asleep", "weights"))


@pytest.mark.parametrize(("context", "parallel"), contexts(turns=(2,)))
def test_ranks_whose_blocks_have_raised_wake_and_train_on_bitwise(tmp_path, context, parallel):
    act = functools.partial(fail_in_a_block, context=context, alone=False)
    _, (_, raised) = run_both(tmp_path, act, PARALLEL[parallel], timeout=SOON)
    assert {mine["error"] for mine in raised} == {"Injected('in the block')"}


@pytest.mark.parametrize("parallel", PARALLEL)
def test_what_fails_on_one_rank_with_the_flag_fails_on_all_and_a_step_skipped_alone_waits_for_none(tmp_path, parallel):
    _, (_, offloaded) = run_both(tmp_path, fail_with_the_flag, PARALLEL[parallel], steps=3, timeout=SOON)
    own = [f"Injected: in {name}" for _, name in ATTACHING + ENDING]
    told = [f"RuntimeError: rank 1 failed, and so every rank does: {error}" for error in own]
    assert [seen["errors"] for seen in offloaded] == [told, own]
    assert all(mine["stays"] and all(mine["stays"]) for mine in offloaded)
