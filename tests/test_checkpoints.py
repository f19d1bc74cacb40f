"""Checkpoints of each optimizer have a resident run's bytes, and resume bitwise."""

import contextlib
import dataclasses
import functools
import shutil

import async_worker
import pytest
import torch
from both import OPTIMIZERS, PACKED, bits, both, release, session_of, steps, training
from saving import (
    FORMATS,
    Saved,
    assert_same_shards,
    background,
    finish,
    load,
    save,
    tensors_in,
)
from test_parity import BF16_MOMENTS, FP16_MASTERS, FP16_MOMENTS
from torch.distributed.checkpoint.api import CheckpointException

import bridge_fgo
from bridge_fgo.config import OffloadConfig
from bridge_fgo.memory.slab import SlabState

pytestmark = pytest.mark.usefixtures("cpu_standins")

SAVED_AFTER, STEPS = 2, 4

TORCHS = {}
"""With torch's AdamW, into which mcore can only load `dp_reshardable`, and that after its first step."""
TES = {"adam": "te"}
FSDP = {"fsdp": "optim_grads_params", "adam": "te"}
FSDP_KINDS = {"fsdp of swiglu": FSDP | {"swiglu": True}, "fsdp": FSDP, "fsdp of experts": FSDP | {"experts": True}}
KINDS = {
    "torch's adam": TORCHS,
    "te's adam": TES,
    **OPTIMIZERS,
    **FSDP_KINDS,
    "fp16 masters": {"adam": FP16_MASTERS},
    "fp16 masters, bf16 moments": {"adam": FP16_MASTERS | BF16_MOMENTS},
    "fp16 masters, fp16 moments": {"adam": FP16_MASTERS | FP16_MOMENTS},
}
IN_THE_SLOW_LANE = (
    "torch's adam",
    "adam",
    "muon",
    "fsdp",
    "fsdp of experts",
    *(kind for kind in KINDS if kind.startswith("fp16")),
)


def with_formats(kind):
    """Return a kind with each format that its checkpoints can have."""
    several = kind in ("torch's adam", "te's adam") or kind.startswith("fp16")
    slow = pytest.mark.slow if kind in IN_THE_SLOW_LANE else ()
    return [pytest.param(kind, format, marks=slow) for format in (FORMATS if several else FORMATS[:1])]


EACH = [pair for kind in KINDS for pair in with_formats(kind)]
LOADABLE = [pair for pair in EACH if pair.values != ("torch's adam", "fully_reshardable")]


@pytest.fixture(scope="module")
def saved(cpu_standins, tmp_path_factory):
    """A function that saves a kind, resident and offloaded, once, in the middle of a pass; by offload and format."""

    @functools.cache
    def save_once(kind):
        folders, ends = {}, []

        def saved_and_trained_on(run):
            offload = run.options.offload
            steps(run, SAVED_AFTER)
            for _, format in (pair.values for pair in with_formats(kind)):
                folders[offload, format] = tmp_path_factory.mktemp("saved")
                release(run)
                save(run, folders[offload, format], format)
                assert not offload or run.live_state_bytes() == 0, "a save leaves states where they are"
            then = bits(run)
            after = steps(run, STEPS - SAVED_AFTER)
            ends.append(bits(run))
            return then, after

        (then, after), _ = both(saved_and_trained_on, **KINDS[kind])
        return Saved(folders, then, after, ends[0])

    return save_once


@pytest.mark.parametrize(("kind", "format"), EACH)
def test_tensor_bytes_on_disk_equal_those_of_a_resident_run(saved, kind, format):
    folders = saved(kind).folders
    assert_same_shards(folders[True, format], folders[False, format])


def rows(pairs, others):
    """Return each pair of kind and format with each of the others."""
    return [pytest.param(*pair.values, *other, marks=pair.marks) for pair in pairs for other in others]


def tensors_of(found):
    """Return bits without the counts of steps, which mcore loads otherwise into torch's AdamW."""
    return {name: value for name, value in found.items() if not name.startswith("steps")}


TO_ANOTHER = [(True, True), (True, False), (False, True)]
ATTACHED_LATER = [(was, will_be, False) for was, will_be in TO_ANOTHER]


@pytest.mark.parametrize(
    ("kind", "format", "was", "will_be", "attached_first"),
    [
        *rows(LOADABLE[1:], [(was, will_be, True) for was, will_be in TO_ANOTHER]),
        *rows(with_formats("te's adam"), ATTACHED_LATER),
    ],
)
def test_a_resumed_run_is_bitwise_the_one_that_was_saved(saved, kind, format, was, will_be, attached_first):
    """The offload is attached before the load in Bridge's MIMO setup, and after it in its other one."""
    before = saved(kind)
    with training(will_be, installed=attached_first, **KINDS[kind]) as run:
        load(run, before.folders[was, format])
        assert not will_be or not attached_first or run.live_state_bytes() == 0, "nothing was loaded to the GPU"
        later = will_be and not attached_first
        with bridge_fgo.install(PACKED) if later else contextlib.nullcontext():
            before.goes_on_in(run)


@pytest.mark.parametrize(
    ("kind", "format", "load_optim"),
    [
        *rows([pair for pair in LOADABLE if not pair.values[0].startswith("fp16")], [(True,)]),
        *rows(with_formats("te's adam"), [(False,)]),
    ],
)
def test_a_load_in_mid_pass_over_states_that_are_there_is_bitwise_as_resident(saved, kind, format, load_optim):
    # Without the gates the load writes into freed memory, and the next reload brings what was there before.
    before = saved(kind)

    def loaded(run):
        steps(run)
        release(run)
        run.cfg.checkpoint.load_optim = load_optim
        load(run, before.folders[True, format])
        assert not run.options.offload or run.live_state_bytes() == 0, "nothing was loaded to the GPU"
        then = bits(run)
        assert (tensors_of(then) == tensors_of(before.bits)) == load_optim
        return then, steps(run, 2)

    both(loaded, **KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_a_state_that_is_there_and_not_in_the_checkpoint_is_mcores_error(saved, offload):
    """Else the moments would be those of one step, and the count by which Adam corrects them that of another."""
    folder = saved("torch's adam").folders[True, "fully_reshardable"]
    with training(offload, **TORCHS) as run:
        steps(run)
        with pytest.raises(KeyError, match="step"):
            load(run, folder)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_save_before_the_first_step_is_a_resident_runs(tmp_path, fraction):
    config = dataclasses.replace(PACKED, fraction=fraction)
    both(lambda run: save(run, tmp_path / str(run.options.offload)), config, **KINDS["fsdp of swiglu"])
    assert_same_shards(tmp_path / "True", tmp_path / "False")


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_save_moves_no_state_to_the_gpu_but_masters_that_were_copied_in_part_each_once(tmp_path, format, packed):
    def seen():
        return [slab.state for slab in engine.slabs], run.live_state_bytes()

    with training(True, dataclasses.replace(PACKED, master_remainders=packed)) as run:
        steps(run, 2)
        engine = session_of(run).engine
        before, back = seen(), engine.traffic.back
        away = [slab for slab in engine.slabs if slab.is_encoded and slab.state is SlabState.RELEASED]
        save(run, tmp_path, format)
        states = [SlabState.OFFLOADING if state is SlabState.RESIDENT else state for state in before[0]]
        assert seen() == (states, before[1])
        assert engine.traffic.back - back == sum(slab.codec.link_bytes for slab in away)
        assert bool(away) == packed


def test_state_dictionaries_before_the_first_step_are_those_of_a_resident_run():
    def asked(run):
        model = run.model[0].sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
        sharded = dict(tensors_in(run.optimizer.sharded_state_dict(model, metadata=metadata)["param_state"]))
        assert not run.options.offload or run.live_state_bytes() == 0
        masters = {path: value for path, value in sharded.items() if path[-1] == "param"}
        return masters, sorted(map(str, sharded)), run.optimizer.state_dict()

    both(asked, adam="te")


def test_the_saved_run_config_names_nothing_of_ours_but_the_flag_and_its_settings(saved):
    lines = {}
    for offload in (True, False):
        text = next(saved("te's adam").folders[offload, FORMATS[0]].rglob("run_config.yaml")).read_text()
        lines[offload] = [line for line in text.splitlines() if not line.startswith("  save: ")]
    added = [line for line in lines[True] if line not in lines[False]]
    settings = [f"    {field.name}:" for field in dataclasses.fields(OffloadConfig)]
    assert sorted(line.partition(":")[0] + ":" for line in added) == sorted(
        ["  offload:", "  offload_optimizer_states:", *settings]
    )
    assert "  offload_optimizer_states: true" in added
    assert [line for line in lines[False] if line not in lines[True]] == []


def test_bridges_torch_format_writes_the_layer_wise_optimizers_file(tmp_path):
    def written(run):
        steps(run, 2)
        run.cfg.checkpoint.ckpt_format = "torch"
        folder = tmp_path / str(run.options.offload)
        save(run, folder)
        return torch.load(next(folder.rglob("layer_wise_optimizer_0.pt")))

    both(written, **OPTIMIZERS["dist_muon"])


# Shards that are harmed.


def harmed(folder, harm, target):
    """Copy a checkpoint to `target`, without its shard or with half of it."""
    shutil.copytree(folder, target)
    shard = max(target.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    if harm == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    return target


@pytest.mark.parametrize(
    ("kind", "harm"),
    [
        pytest.param("te's adam", "missing", marks=pytest.mark.slow),
        ("te's adam", "truncated"),
        pytest.param("fsdp of swiglu", "missing", marks=pytest.mark.slow),
    ],
)
def test_a_harmed_shard_is_an_error_after_which_all_is_as_in_a_resident_run(saved, tmp_path, kind, harm):
    # torch's `FileSystemReader.read_data` reads into the states themselves, so what is before the harm in the file is
    # loaded, resident too; nobody in Bridge catches the error, and a restart in the process builds the optimizer anew.
    before = saved(kind)
    good = before.folders[True, with_formats(kind)[-1].values[1]]
    bad = harmed(good, harm, tmp_path / "checkpoint")
    left = {path: path.stat().st_mtime_ns for path in bad.rglob("*")}

    def loads_it(run):
        steps(run)
        seen = [bits(run)]
        release(run)
        with pytest.raises(CheckpointException):  # on every rank; it is no Exception
            load(run, bad)
        if kind == "te's adam":
            seen.append(bits(run))
            assert (seen[0] == seen[1]) == (harm == "missing")
            seen += steps(run, 2)
        load(run, good)
        assert tensors_of(bits(run)) == tensors_of(before.bits)
        return seen

    both(loads_it, **KINDS[kind])
    assert {path: path.stat().st_mtime_ns for path in bad.rglob("*")} == left


# In the background.


@pytest.fixture
def weights_of_their_own(monkeypatch):
    """Have a writer get copies of the model's weights, as it has of a GPU's before training goes on.

    Here they are whole tensors in host memory, which torch shares with the writer's process, and the next step changes.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    prepare = FileSystemWriterAsync.prepare_write_data

    def prepared(writer, plan, planner):
        prepare(writer, plan, planner)
        for _, _, (_, tensors) in writer.write_buckets:
            is_state = [item.index.fqn.startswith("optimizer") for item, _ in tensors]
            tensors[:] = [
                (item, tensor if of_optimizer else tensor.clone())
                for (item, tensor), of_optimizer in zip(tensors, is_state, strict=True)
            ]

    monkeypatch.setattr(FileSystemWriterAsync, "prepare_write_data", prepared)


CONSTANT, SPAWNED, LENT = "constant structure", "spawned", "lent"
IN_THE_BACKGROUND = [
    *((name, FORMATS[0], worker) for name in OPTIMIZERS for worker in ("fork", "mcore")),
    ("torch's adam", "fully_reshardable", "fork", CONSTANT),
    ("torch's adam", "fully_reshardable", "mcore", SPAWNED),
    ("torch's adam", "fully_reshardable", "nvrx", SPAWNED),
    ("torch's adam", "dp_reshardable", "fork"),
    ("torch's adam", "dp_reshardable", "mcore", CONSTANT),
    ("torch's adam", "dp_reshardable", "nvrx", CONSTANT, SPAWNED),
    ("torch's adam", "dp_reshardable", "mcore", LENT),
    ("torch's adam", "dp_reshardable", "mcore", LENT, CONSTANT),
]
"""Kinds, formats and writers, and how: with a constant structure; a worker that is spawned as Bridge does it; and one
that is done before the next save, so that each is lent host buffers, others than the one before."""


@pytest.mark.slow
@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("row", IN_THE_BACKGROUND, ids="-".join)
def test_three_background_checkpoints_have_the_bytes_of_their_step(request, tmp_path, monkeypatch, row):
    kind, format, worker, *how = row
    if kind in OPTIMIZERS:
        request.getfixturevalue("weights_of_their_own")
    if worker == "nvrx":
        module = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"
        pytest.importorskip(module, reason="needs nvidia-resiliency-ext", exc_type=ImportError)
    if worker != "fork":  # the persistent workers are spawned, and import what they run
        async_worker.have_bridge_use(worker, monkeypatch.setattr, quickly=SPAWNED not in how)
    for offload in (False, True):
        context, lent = {}, []
        with training(offload, **KINDS[kind]) as run:
            run.cfg.checkpoint.ckpt_assume_constant_structure = CONSTANT in how
            if offload:
                background(run, worker, tmp_path)
            for number in range(3):
                steps(run)
                save(run, tmp_path / str(offload) / str(number), format, context)
                if offload:
                    assert run.state.async_calls_queue.get_num_unfinalized_calls() > 0
                    lent.append({slab.host.address for slab in session_of(run).engine.slabs if slab.is_lent})
                if LENT in how or number == 2:
                    steps(run)  # overwrites every state and every host buffer while the writer may still read
                    if offload:
                        finish(run, terminate=number == 2)
        if offload and LENT in how:
            assert all(lent) and lent[0] != lent[1], (
                "what the step copies out while a writer reads goes to a second buffer"
            )
    for number in range(3):
        assert_same_shards(tmp_path / "True" / str(number), tmp_path / "False" / str(number))
