"""Bridge's own save and load (torch_dist, synchronous) around offloaded states."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

import bridge_fgo
from bridge_fgo.cli.arms.cpu_training import CpuOptions, CpuTraining

pytestmark = pytest.mark.usefixtures("cpu_standins")

SMALL_SLABS = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20)


@contextlib.contextmanager
def training(offload):
    """A CPU training, with the package installed where it is to offload."""
    with contextlib.ExitStack() as stack:
        if offload:
            stack.enter_context(bridge_fgo.install(SMALL_SLABS))
        yield stack.enter_context(CpuTraining(CpuOptions(offload=offload)))


def save(run, folder):
    """Save through Bridge's `save_checkpoint`."""
    from megatron.bridge.training.checkpointing import save_checkpoint

    run.cfg.checkpoint.save = str(folder)
    save_checkpoint(run.state, run.model, run.optimizer, run.scheduler, 0, checkpointing_context={})


def load(run, folder):
    """Load through Bridge's `load_checkpoint`."""
    from megatron.bridge.training.checkpointing import load_checkpoint

    run.cfg.checkpoint.load = str(folder)
    load_checkpoint(run.state, run.model, run.optimizer, run.scheduler, checkpointing_context={})


@pytest.fixture(scope="module")
def saved(cpu_standins, tmp_path_factory):
    """Save after three steps, resident and offloaded; return the folders, and the digests by offload."""
    folders, digests = {}, {}
    for offload in (False, True):
        folders[offload] = tmp_path_factory.mktemp("offloaded" if offload else "resident")
        with training(offload) as run:
            for _ in range(3):
                run.step()
            save(run, folders[offload])
            digests[offload] = run.digests()
            run.step()
            assert max(run.live_bytes) == 0 if offload else min(run.live_bytes) > 0
    return folders, digests


def test_tensor_bytes_on_disk_equal_those_of_a_resident_run(saved):
    shards = {offload: sorted(folder.rglob("*.distcp")) for offload, folder in saved[0].items()}
    assert [path.name for path in shards[True]] == [path.name for path in shards[False]] != []
    for offloaded, resident in zip(shards[True], shards[False], strict=True):
        assert offloaded.read_bytes() == resident.read_bytes()


def test_the_saved_run_config_names_nothing_of_ours_but_the_flag(saved):
    text = {offload: next(folder.rglob("run_config.yaml")).read_text() for offload, folder in saved[0].items()}
    lines = {
        offload: [line for line in text[offload].splitlines() if not line.startswith("  save: ")] for offload in text
    }
    added = [line for line in lines[True] if line not in lines[False]]
    assert added == ["  offload_optimizer_states: true"]
    assert [line for line in lines[False] if line not in lines[True]] == []


def resumed(folder: Path, offload: bool):
    """Load into a training that has stepped once; return its digests after the load and two steps later."""
    with training(offload) as run:
        run.step()  # mcore cannot load into torch's AdamW before its first step
        load(run, folder)
        after_load = run.digests()
        for _ in range(2):
            run.step()
            assert not offload or max(run.live_bytes) == 0
        return after_load, run.digests()


@pytest.mark.parametrize(("was", "will_be"), [(True, True), (True, False), (False, True)])
def test_a_resumed_run_is_bitwise_the_resident_one(saved, was, will_be):
    folders, digests = saved
    after_load, later = resumed(folders[was], will_be)
    assert after_load == digests[False]
    assert later == resumed(folders[False], False)[1]


def test_a_save_in_the_middle_of_a_pass_writes_the_right_bytes(saved, tmp_path):
    from bridge_fgo.wiring.session import SESSION

    with training(True) as run:
        for _ in range(3):
            run.step()
        session = vars(run.optimizer)[SESSION]
        session.begin_pass()
        session.release()
        assert run.live_state_bytes() == 0
        save(run, tmp_path)
    for mine, resident in zip(
        sorted(tmp_path.rglob("*.distcp")), sorted(saved[0][False].rglob("*.distcp")), strict=True
    ):
        assert mine.read_bytes() == resident.read_bytes()
