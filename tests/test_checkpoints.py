"""Bridge's own save and load (torch_dist) around offloaded states, in the foreground and in the background."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path

import async_worker
import pytest
import torch
from saving import load, save
from torch.distributed.checkpoint.api import CheckpointException

import bridge_fgo
from bridge_fgo.bridge.session import SESSION
from bridge_fgo.config import OffloadConfig
from bridge_fgo.memory.slab import SlabState
from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining

pytestmark = pytest.mark.usefixtures("cpu_standins")

SMALL_SLABS = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20, master_remainders=True)
FORMATS = ["fully_reshardable", "dp_reshardable"]


@contextlib.contextmanager
def training(offload, config=SMALL_SLABS, **options):
    """A CPU training, with the package installed where it is to offload."""
    with contextlib.ExitStack() as stack:
        if offload:
            stack.enter_context(bridge_fgo.install(config))
        yield stack.enter_context(CpuTraining(CpuOptions(offload=offload, **options)))


def session_of(run):
    return vars(run.optimizer)[SESSION]


def where(run):
    """The residency of every slab."""
    return [slab.state for slab in session_of(run).engine.slabs]


def assert_same_shards(mine, theirs):
    """The tensor bytes on disk are equal; the padding of dp_reshardable, which mcore never fills, is not compared."""
    shards = [sorted(folder.rglob("*.distcp")) for folder in (mine, theirs)]
    assert [path.name for path in shards[0]] == [path.name for path in shards[1]] != []
    for ours, resident in zip(*shards, strict=True):
        assert ours.read_bytes() == resident.read_bytes()


@pytest.fixture(scope="module")
def saved(cpu_standins, tmp_path_factory):
    """Save after three steps, resident and offloaded; return the folders, and the digests by offload."""
    folders, digests = {}, {}
    for offload in (False, True):
        with training(offload) as run:
            for _ in range(3):
                run.step()
            for kind in FORMATS:
                folders[offload, kind] = tmp_path_factory.mktemp(f"{'offloaded' if offload else 'resident'}_{kind}")
                save(run, folders[offload, kind], kind)
            digests[offload] = run.digests()
            run.step()
            assert max(run.live_bytes) == 0 if offload else min(run.live_bytes) > 0
    return folders, digests


@pytest.mark.parametrize("kind", FORMATS)
def test_tensor_bytes_on_disk_equal_those_of_a_resident_run(saved, kind):
    assert_same_shards(saved[0][True, kind], saved[0][False, kind])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_save_moves_no_state_to_the_gpu(tmp_path, kind):
    with training(True, dataclasses.replace(SMALL_SLABS, master_remainders=False)) as run:
        for _ in range(2):
            run.step()
        traffic = session_of(run).engine.traffic
        before = where(run), traffic.back, run.live_state_bytes()
        save(run, tmp_path, kind)
        assert (where(run), traffic.back, run.live_state_bytes()) == before
        assert SlabState.RESIDENT not in before[0]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_save_brings_back_masters_that_were_copied_in_part_each_once_and_sends_them_off_again(tmp_path, kind):
    with training(True) as run:
        for _ in range(2):
            run.step()
        engine = session_of(run).engine
        before = where(run), run.live_state_bytes()
        moved = engine.traffic.back
        packed = [
            slab.codec.link_bytes for slab in engine.slabs if slab.is_encoded and slab.state is SlabState.RELEASED
        ]
        save(run, tmp_path, kind)
        assert packed
        assert engine.traffic.back - moved == sum(packed)
        assert (where(run), run.live_state_bytes()) == before


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_handed_out_for_a_checkpoint_shares_no_memory_with_a_slab(kind):
    # A background writer reads for minutes; a later step must not be able to change a byte of it.
    with training(True) as run:
        for _ in range(2):
            run.step()
        slabs = session_of(run).engine.slabs
        ours = {tensor.untyped_storage()._cdata for slab in slabs for tensor in (slab.gpu, slab.host.tensor)}
        addresses = [(slab.host.address, slab.host.address + slab.nbytes) for slab in slabs]
        model = run.model[0].sharded_state_dict()
        state = run.optimizer.sharded_state_dict(model, metadata={"distrib_optim_sharding_type": kind})
        tensors = list(tensors_in(state["param_state"]))
        assert tensors
        assert not ours & {tensor.untyped_storage()._cdata for tensor in tensors}
        assert not any(start <= tensor.data_ptr() < end for tensor in tensors for start, end in addresses)


def tensors_in(value):
    """Yield every tensor in a nested state dictionary."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "data"):
        yield from tensors_in(value.data)


def test_the_saved_run_config_names_nothing_of_ours_but_the_flag_and_its_settings(saved):
    folders = {offload: saved[0][offload, FORMATS[0]] for offload in (True, False)}
    text = {offload: next(folder.rglob("run_config.yaml")).read_text() for offload, folder in folders.items()}
    lines = {
        offload: [line for line in text[offload].splitlines() if not line.startswith("  save: ")] for offload in text
    }
    added = [line for line in lines[True] if line not in lines[False]]
    settings = [f"    {field.name}:" for field in dataclasses.fields(OffloadConfig)]
    assert sorted(line.partition(":")[0] + ":" for line in added) == sorted(
        ["  offload:", "  offload_optimizer_states:", *settings]
    )
    assert "  offload_optimizer_states: true" in added
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
    folders, digests = saved  # of the other format mcore cannot load into torch's AdamW (KeyError: 'step')
    after_load, later = resumed(folders[was, "dp_reshardable"], will_be)
    assert after_load == digests[False]
    assert later == resumed(folders[False, "dp_reshardable"], False)[1]


def harmed(folder, harm, target):
    """Copy a checkpoint to `target`, without its shard or with half of it."""
    shutil.copytree(folder, target)
    shard = max(target.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    if harm == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    return target


def after_a_failed_load(good, bad, offload):
    """Load a harmed checkpoint, where offloaded in mid-pass, catch the error, and train on.

    Return digests before the load, after it, two steps later, and when the whole checkpoint is loaded then.
    """
    with training(offload) as run:
        run.step()
        digests = [run.digests()]
        if offload:
            session_of(run).begin_pass()
            session_of(run).release()
            assert run.live_state_bytes() == 0
        with pytest.raises(CheckpointException):  # on every rank
            load(run, bad)
        digests.append(run.digests())
        for _ in range(2):
            run.step()
            assert not offload or max(run.live_bytes) == 0
        digests.append(run.digests())
        load(run, good)
        digests.append(run.digests())
        return digests


@pytest.mark.parametrize("harm", ["missing", "truncated"])
def test_a_harmed_shard_is_an_error_after_which_all_is_as_in_a_resident_run(saved, tmp_path, harm):
    # torch's `FileSystemReader.read_data` reads into the states themselves, so what is before the harm in the file is
    # loaded, resident too; nobody in Bridge catches the error, and a restart in the process builds the optimizer anew.
    folders, digests = saved
    good = folders[True, "dp_reshardable"]
    bad = harmed(good, harm, tmp_path / "checkpoint")
    left = {path: path.stat().st_mtime_ns for path in bad.rglob("*")}
    seen = {offload: after_a_failed_load(good, bad, offload) for offload in (False, True)}
    assert seen[True] == seen[False]
    before, after, _, loaded = seen[True]
    assert (before == after) == (harm == "missing")
    assert loaded == digests[False]
    assert {path: path.stat().st_mtime_ns for path in bad.rglob("*")} == left


@pytest.mark.parametrize("kind", FORMATS)
def test_a_save_in_the_middle_of_a_pass_writes_the_right_bytes(saved, tmp_path, kind):
    with training(True) as run:
        for _ in range(3):
            run.step()
        session = session_of(run)
        session.begin_pass()
        session.release()
        assert run.live_state_bytes() == 0
        save(run, tmp_path, kind)
    assert_same_shards(tmp_path, saved[0][False, kind])


def assert_third_step_is_saved_alike(folder, kind, ended, **options):
    """Resident and offloaded, a save after the third step writes the same; `ended` tells that the step did so."""
    for offload in (False, True):
        with training(offload, **options) as run:
            for _ in range(3):
                record = run.step()
            assert ended(record)
            save(run, folder / str(offload), kind)
    assert_same_shards(folder / "True", folder / "False")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("what", [{"found_inf_steps": (3,)}, {"grad_norm_skip_steps": (3,)}])
def test_a_save_after_a_skipped_step_writes_the_right_bytes(tmp_path, kind, what):
    assert_third_step_is_saved_alike(tmp_path, kind, lambda record: record.skipped, **what)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_save_at_the_rerun_machines_early_exit_writes_the_right_bytes(tmp_path, kind):
    # The step ends before optimizer.step(), with the reload that finalize started in flight.
    assert_third_step_is_saved_alike(tmp_path, kind, lambda record: record.should_checkpoint, checkpoint_exit_step=3)


@pytest.mark.parametrize("kind", FORMATS)
def test_states_that_stay_on_the_gpu_are_saved_too(saved, tmp_path, kind):
    some = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20, fraction=0.5)
    with training(True, some) as run:
        for _ in range(3):
            run.step()
        engine = session_of(run).engine
        engine.schedule.parts[0].stays = True
        engine.require_readable()
        save(run, tmp_path, kind)
    assert_same_shards(tmp_path, saved[0][False, kind])


# In the background.


def background(run, worker, folder):
    """Have `save` hand checkpoints to a writer in a process of its own."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    checkpoint = run.cfg.checkpoint
    checkpoint.async_save, checkpoint.save = True, str(folder)
    checkpoint.async_strategy = "nvrx" if worker == "nvrx" else "mcore"
    if worker == "fork":
        run.state._async_calls_queue = AsyncCallsQueue(persistent=False)
    else:
        checkpoint.async_write_results_mp_mode = "spawn"
        run.state.initialize_async_checkpoint_worker()


def finish(run, terminate=True):
    """Wait for the writer, and end it."""
    from megatron.bridge.training.checkpointing import maybe_finalize_async_save

    maybe_finalize_async_save(run.state, run.cfg.checkpoint, blocking=True, terminate=terminate)


@pytest.mark.slow
@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize(
    ("kind", "worker", "constant_structure"),
    [
        ("fully_reshardable", "fork", True),
        ("fully_reshardable", "mcore", False),
        ("fully_reshardable", "nvrx", False),
        ("dp_reshardable", "fork", False),
        ("dp_reshardable", "mcore", True),
        ("dp_reshardable", "nvrx", True),
    ],
)
def test_three_checkpoints_in_the_background_have_the_bytes_of_their_step(
    tmp_path, monkeypatch, kind, worker, constant_structure
):
    if worker == "nvrx":
        pytest.importorskip(
            "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
            reason="needs nvidia-resiliency-ext",
            exc_type=ImportError,
        )
    if worker != "fork":  # the persistent workers are spawned, and import what they run
        as_bridge_does = worker == "nvrx" or kind == "fully_reshardable"
        async_worker.have_bridge_use(worker, monkeypatch.setattr, quickly=not as_bridge_does)
    for offload in (False, True):
        context = {}
        with training(offload) as run:
            run.cfg.checkpoint.ckpt_assume_constant_structure = constant_structure
            if offload:
                background(run, worker, tmp_path)
            for number in range(3):
                run.step()
                save(run, tmp_path / str(offload) / str(number), kind, context)
                if offload:
                    assert run.state.async_calls_queue.get_num_unfinalized_calls() > 0
            run.step()  # overwrites every state and every host buffer while the writer may still read
            if offload:
                assert max(run.live_bytes) == 0
                finish(run)
    for number in range(3):
        assert_same_shards(tmp_path / "True" / str(number), tmp_path / "False" / str(number))


@pytest.mark.slow
@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("constant_structure", [False, True], ids=["", "constant structure"])
def test_checkpoints_that_are_lent_host_buffers_have_the_bytes_of_their_step(tmp_path, monkeypatch, constant_structure):
    # The writer is done before the next save, so that each is lent, and gets the other buffer than the one before.
    async_worker.have_bridge_use("mcore", monkeypatch.setattr, quickly=True)
    for offload in (False, True):
        context, lent = {}, []
        with training(offload) as run:
            run.cfg.checkpoint.ckpt_assume_constant_structure = constant_structure
            if offload:
                background(run, "mcore", tmp_path)
            for number in range(3):
                run.step()
                save(run, tmp_path / str(offload) / str(number), "dp_reshardable", context)
                if offload:
                    lent.append({slab.host.address for slab in session_of(run).engine.slabs if slab.is_lent})
                run.step()  # while the writer may still read
                if offload:
                    finish(run, terminate=number == 2)
        if offload:
            assert lent[0] and lent[0] == lent[2] and not lent[0] & lent[1], "two buffers take turns"
    for number in range(3):
        assert_same_shards(tmp_path / "True" / str(number), tmp_path / "False" / str(number))
