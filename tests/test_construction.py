"""An optimizer is built, and a checkpoint loaded, with no more of its states on the device than two parts."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import fused_adam
import pytest
import torch
from comparing import assert_equal, trained
from saving import load, save
from storage_meter import StorageMeter
from test_checkpoints import FORMATS, session_of

import bridge_fgo
from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining
from bridge_fgo.tools.arms.final_state import mcore_optimizers

KIB = 1024
PARTS = bridge_fgo.OffloadConfig(engine="native", master_remainders=True)
"""Some 20 parts of the states, none larger than those of the largest tensor."""
SMALL = {"layers": 8, "hidden": 64}
SCALARS = 4 * KIB
"""Bytes for counts, sums and norms."""
REMAINDERS = {"store_param_remainders": True}
PRECISION_AWARE = {
    "fp32": {"store_param_remainders": False},
    "bf16": {"store_param_remainders": False, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "fp16 masters": {
        "store_param_remainders": False,
        "main_params_dtype": torch.float16,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
    "bf16, remainders": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16, **REMAINDERS},
}


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr("bridge_fgo.memory.layout.LEAST_PART_BYTES", 64 * KIB)


pytestmark = pytest.mark.usefixtures("small_parts", "cpu_standins")


@contextlib.contextmanager
def measured_build():
    """Context in which the build of an optimizer is measured; gives a list of peaks in bytes, one for each."""
    from megatron.bridge.training import setup

    original, peaks = setup.setup_optimizer, []

    def build(optimizer_config, scheduler_config, model, **kwargs):
        known = [parameter for chunk in model for parameter in chunk.parameters()]
        known += [t for chunk in model for buffer in buffers(chunk) for t in of(buffer)]
        with StorageMeter(known) as meter:
            result = original(optimizer_config, scheduler_config, model, **kwargs)
        peaks.append(meter.peak)
        return result

    with mock.patch.object(setup, "setup_optimizer", build):
        yield peaks


def of(buffer):
    """The memory of a DDP buffer, which has parameters only under a DistributedOptimizer."""
    return [tensor for tensor in (buffer.param_data, buffer.grad_data) if tensor is not None]


def buffers(chunk):
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


@contextlib.contextmanager
def training(offload, config=PARTS, peaks=None, precision_aware=None, **options):
    """A CPU training; `peaks` gets what its build held of the device."""
    with contextlib.ExitStack() as stack:
        if offload:
            remainders = None if precision_aware else config.master_remainders  # which it has, or not, of its own
            stack.enter_context(bridge_fgo.install(dataclasses.replace(config, master_remainders=remainders)))
        with pytest.MonkeyPatch.context() as patch, measured_build() as built:
            if precision_aware is not None:
                fused_adam.have_trainings_ask_for(precision_aware, patch.setattr)
            run = stack.enter_context(CpuTraining(CpuOptions(offload=offload, **SMALL | options)))
        if peaks is not None:
            peaks += built
        yield run


def two_parts(run):
    return 2 * max(part.nbytes for part in session_of(run).engine.schedule.parts) + SCALARS


def masters(run):
    """Every master that mcore keeps, in an order of its own."""
    return [
        master
        for leaf in mcore_optimizers(run.optimizer)
        for group in (
            leaf.fp32_from_float16_groups
            if hasattr(leaf, "fp32_from_float16_groups")
            else leaf.shard_fp32_from_float16_groups
        )
        for master in group
    ]


KINDS = {
    "dense": {},
    "experts": {"experts": True},
    "fp32_params": {"precision": "fp32_params"},
    "chunks": {"chunks": 2, "layers": 4},
    "frozen": {"frozen": True, "layers": 24},
}
WHOLE = {
    "adam": {"distributed": False},
    "adam_fp32_params": {"distributed": False, "precision": "fp32_params"},
    "adam_experts": {"distributed": False, "experts": True},
    "muon": {"distributed": False, "optimizer": "muon"},
    "dist_muon": {"distributed": False, "optimizer": "dist_muon"},
}
"""Under Float16OptimizerWithFloat16Params: masters of whole parameters."""
FAST_WHOLE = ("muon",)
ALL_KINDS = KINDS | WHOLE
EVERY_KIND = [
    pytest.param(kind, marks=pytest.mark.slow) if kind in WHOLE and kind not in FAST_WHOLE else kind
    for kind in ALL_KINDS
]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_building_holds_no_more_of_the_states_than_two_parts(kind):
    peaks = []
    with training(False, peaks=peaks, **ALL_KINDS[kind]) as run:
        all_masters = sum(master.nbytes for master in masters(run))
    with training(True, peaks=peaks, **ALL_KINDS[kind]) as run:
        allowed = two_parts(run)
        assert run.live_state_bytes() == 0
    resident, offloaded = peaks
    assert resident >= all_masters > 2 * allowed
    assert offloaded <= allowed


ADAMS = {name: pytest.mark.slow for name in ("fp32", "bf16")} | {None: (), "fp16 masters": (), "bf16, remainders": ()}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, id=name or "masters in mcore", marks=marks) for name, marks in ADAMS.items()],
)
def adam(request, cpu_standins):
    """Settings of a precision-aware Adam, which mcore then builds; None for an Adam with fp32 masters in mcore."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param is None:
            fused_adam.have_mcore_take_it(patch.setattr)
            yield None
        else:
            fused_adam.have_mcore_make_it_precision_aware(patch)
            yield PRECISION_AWARE[request.param]


def everything(run):
    """Every weight and state of a training, and the counts of steps."""
    bridge_fgo.reload_states()
    found = {name: parameter.clone() for name, parameter in run.model[0].named_parameters()}
    for number, leaf in enumerate(mcore_optimizers(run.optimizer)):
        for index, group in enumerate(leaf.optimizer.param_groups):
            found[f"{number}.{index}.step"] = torch.tensor(group.get("step", 0))
            for place, param in enumerate(group["params"]):
                states = {"param": param, **leaf.optimizer.state.get(param, {})}
                found |= {f"{number}.{index}.{place}.{name}": value.clone() for name, value in states.items()}
    return found


def measured_load(run, folder):
    """Load; return the most bytes that were held of the device beside weights and gradients."""
    known = [parameter for chunk in run.model for parameter in chunk.parameters()]
    known += [t for chunk in run.model for buffer in buffers(chunk) for t in of(buffer)]
    states = [m for m in masters(run) if m is not None]
    states += [
        value
        for leaf in mcore_optimizers(run.optimizer)
        for of_param in leaf.optimizer.state.values()
        for value in of_param.values()
    ]
    with StorageMeter(known, states) as meter:
        load(run, folder)
    return meter.peak


# An optimizer of experts is one of dense parameters too.
@pytest.fixture(scope="module")
def saved(adam, tmp_path_factory):
    """A resident run that is saved: options, its folder by format, what there was then, and how it went on."""
    folders = {}
    options = {"experts": True, "precision_aware": adam}
    with training(False, **options) as run:
        trained(run, 2)
        for kind in FORMATS:
            folders[kind] = tmp_path_factory.mktemp("saved")
            save(run, folders[kind], kind)
        then = everything(run)
        wanted = (adam or {}).get("main_params_dtype")
        assert wanted in {None, *(t.dtype for name, t in then.items() if name.endswith("master_param"))}
        rest = trained(run, 2), everything(run)
    return options, folders, then, rest


def resume(run):
    for _ in range(2 * run.options.microbatches):
        next(run._batches)
    run._batches.advance()


@pytest.mark.parametrize("kind", FORMATS)
def test_loading_holds_no_more_of_the_states_than_two_parts_and_loads_every_bit(saved, kind):
    options, folders, then, (numbers, end) = saved
    if kind == "fully_reshardable" and (options["precision_aware"] or {}).get("store_param_remainders"):
        pytest.skip("mcore saves remainders as fp32 in this format, and Transformer Engine refuses to load them")
    with training(True, **options) as run:
        peak = measured_load(run, folders[kind])
        assert run.live_state_bytes() == 0
        allowed = two_parts(run)
        assert peak <= allowed < session_of(run).engine.state_bytes / 4
        assert_equal(everything(run), then)
        resume(run)
        assert trained(run, 2) == numbers
        assert_equal(everything(run), end)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_what_is_built_and_trained_is_bitwise_a_resident_run(kind):
    ends = {}
    for offload in (False, True):
        with training(offload, **ALL_KINDS[kind]) as run:
            begins = everything(run)
            ends[offload] = begins, trained(run, 2), everything(run)
    assert_equal(ends[True][0], ends[False][0])
    assert ends[True][1] == ends[False][1]
    assert_equal(ends[True][2], ends[False][2])


@pytest.mark.parametrize("some", [{"master_weights": False}, {"fraction": 0.5}], ids=str)
def test_masters_that_stay_on_the_device_are_made_there(some):
    with training(False) as run:
        resident = everything(run), trained(run, 2), everything(run)
    config = bridge_fgo.OffloadConfig(engine="native", **some)
    with training(True, config) as run:
        assert 0 < run.live_state_bytes() <= sum(master.nbytes for master in masters(run))
        assert_equal(everything(run), resident[0])
        assert trained(run, 2) == resident[1]
        assert_equal(everything(run), resident[2])


@pytest.mark.usefixtures("fused_adam_in_mcore")
def test_a_load_of_weights_alone_rewrites_the_masters_part_by_part(tmp_path):
    with training(False) as run:
        trained(run, 2)
        save(run, tmp_path)
    ends = {}
    for offload in (False, True):
        with training(offload) as run:
            run.cfg.checkpoint.load_optim = False
            peak = measured_load(run, tmp_path)
            if offload:
                assert run.live_state_bytes() == 0 < peak <= two_parts(run)
            begins = everything(run)
            ends[offload] = begins, trained(run, 2), everything(run)
    assert_equal(ends[True][0], ends[False][0])
    assert ends[True][1] == ends[False][1]
    assert_equal(ends[True][2], ends[False][2])


def tensors_in(value, path=()):
    """Yield every tensor in a nested state dictionary, with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors_in(item, (*path, index))
    elif hasattr(value, "data"):
        yield from tensors_in(value.data, path)


@pytest.mark.usefixtures("fused_adam_in_mcore")
def test_state_dictionaries_before_the_first_step_are_those_of_a_resident_run():
    found = {}
    for offload in (False, True):
        with training(offload) as run:
            model = run.model[0].sharded_state_dict()
            metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
            sharded = run.optimizer.sharded_state_dict(model, metadata=metadata)["param_state"]
            assert not offload or run.live_state_bytes() == 0
            found[offload] = dict(tensors_in(sharded)), run.optimizer.state_dict()
    masters_of = [{path: value for path, value in found[on][0].items() if path[-1] == "param"} for on in (True, False)]
    assert_equal(*masters_of)
    assert found[True][0].keys() == found[False][0].keys()
    assert found[True][1] == found[False][1]


def test_whoever_reads_masters_past_the_package_before_training_gets_them_by_reload_states():
    with training(False) as run:
        expected = [master.clone() for master in masters(run)]
    with training(True) as run:
        assert {master.untyped_storage().nbytes() for master in masters(run)} == {0}, "a read would end the process"
        bridge_fgo.reload_states()
        assert all(torch.equal(*pair) for pair in zip(masters(run), expected, strict=True))


def test_masters_are_made_at_once_where_nothing_is_offloaded():
    with bridge_fgo.install(PARTS), training(False) as run:
        assert run.live_state_bytes() == sum(master.nbytes for master in masters(run)) > 0


@pytest.mark.parametrize("kind", ["dense", pytest.param("muon", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fails", ["building", "attaching"])
def test_a_build_that_fails_leaves_a_model_that_can_be_given_another_optimizer(monkeypatch, fails, kind):
    from megatron.bridge.training import setup

    with training(False, **ALL_KINDS[kind]) as run:
        expected = [master.clone() for master in masters(run)]
        run.cfg.optimizer.offload_optimizer_states = True
        how = (run.cfg.optimizer, run.cfg.scheduler, run.model)
        with bridge_fgo.install(PARTS):
            with monkeypatch.context() as patch:

                def fail(*args, **kwargs):
                    raise KeyError("no")

                name = {"building": "megatron.bridge.training.optim._get_scheduler"}.get(fails)
                patch.setattr(name or "bridge_fgo.bridge.before_training.attach", fail)
                with pytest.raises(KeyError, match="no"):
                    setup.setup_optimizer(*how)
            weights = [p for chunk in run.model for p in chunk.parameters() if p.dtype == torch.bfloat16]
            assert all(weight.main_param is None for weight in weights)
            run.optimizer, run.scheduler = setup.setup_optimizer(*how)
            bridge_fgo.reload_states()
            assert all(torch.equal(*pair) for pair in zip(masters(run), expected, strict=True))


def test_optimizers_that_are_put_into_another_chain_keep_their_masters():
    from megatron.bridge.training import setup
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    with training(False) as run:
        resident = trained(run, 2), everything(run)
    with training(True) as run:
        first = session_of(run)
        run.optimizer = ChainedOptimizer(list(mcore_optimizers(run.optimizer)))
        setup._update_model_config_funcs(run.model, run.cfg.model, run.cfg.ddp, run.optimizer, pg_collection=run.groups)
        assert first.closed and session_of(run) is not first
        assert (trained(run, 2), everything(run))[0] == resident[0]
        assert_equal(everything(run), resident[1])
