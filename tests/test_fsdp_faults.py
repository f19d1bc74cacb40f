"""A save under Megatron-FSDP fails or is killed: the last checkpoint is whole, and training goes on bitwise."""

from __future__ import annotations

import json
import signal

import children
import pytest
from fault_child import FSDP_OPTIONS, SAVED_AFTER_EACH, break_at, train_under_fsdp
from saving import newest, save, send_all_away
from test_checkpoints import assert_same_shards, training

import bridge_fgo

pytestmark = pytest.mark.usefixtures("cpu_standins")

WHOLE_MASTERS = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20)

NAMED = "the config is written"
"""The one point at which the second checkpoint is whole and named."""

KILLS = [
    ("the entries are made", 1),
    ("a state is handed to a checkpoint", 1),
    ("a state is handed to a checkpoint", 7),
    ("an entry is written", 1),
    ("an entry is written", 40),
    ("the metadata is written", 1),
    ("the checkpoint is named", 1),
    (NAMED, 1),
]
"""Points of the second save, and at which of its calls there the run is killed."""


def run(folder, *args) -> int:
    """Run a child to its end; return its exit status, negative where a signal ended it."""
    folder.mkdir(exist_ok=True)
    return children.join(children.start(train_under_fsdp, str(folder), *args), f"with {args}")


def seen(folder):
    """Return the numbers by step and the digests of a child that came to its end."""
    found = json.loads((folder / "seen.json").read_text())
    return found["numbers"], found["digests"]


@pytest.fixture(scope="module")
def unbroken(cpu_standins, tmp_path_factory):
    """The folder of a resident run that nothing broke."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert run(folder, False) == 0
    return folder


def test_a_save_that_fails_in_its_write_leaves_the_last_checkpoint_and_training_goes_on(tmp_path, monkeypatch):
    digests = {}
    for offload in (False, True):
        folder = tmp_path / str(offload)
        with training(offload, WHOLE_MASTERS, **FSDP_OPTIONS) as run:
            run.step()
            save(run, folder)
            run.step()
            send_all_away()
            if offload:
                with monkeypatch.context() as patch:
                    break_at("an entry is written", 40, "failed", patch.setattr)
                    with pytest.raises(BaseException, match="an entry is written"):  # no Exception of PyTorch's
                        save(run, folder)
                assert newest(folder).name == "iter_0000001"
            save(run, folder)
            run.step()
            digests[offload] = run.digests()
    assert digests[True] == digests[False]
    for step in (1, 2):
        assert_same_shards(*(tmp_path / f"{offload}" / f"iter_{step:07d}" for offload in (True, False)))


@pytest.mark.slow
@pytest.mark.parametrize(("point", "call"), KILLS)
def test_a_run_killed_in_a_save_resumes_from_the_last_whole_checkpoint_bitwise(unbroken, tmp_path, point, call):
    assert run(tmp_path, True, point, call) == -signal.SIGKILL
    last = SAVED_AFTER_EACH[point == NAMED]
    assert newest(tmp_path).name == f"iter_{last:07d}"
    assert run(tmp_path, True) == 0
    numbers, digests = seen(tmp_path)
    resident, digests_of_resident = seen(unbroken)
    assert numbers == {number: resident[number] for number in resident if int(number) > last} != {}
    assert digests == digests_of_resident
    # What the killed save had written is written over.
    for step in SAVED_AFTER_EACH:
        assert_same_shards(*(folder / f"iter_{step:07d}" for folder in (tmp_path, unbroken)))
