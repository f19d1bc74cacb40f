"""Building and loading hold at most two parts of the states on the device."""

import contextlib
import functools
from unittest import mock

import both as both_module
import pytest
import torch
from both import OPTIMIZERS, bits, session_of, steps
from cpu_model import microbatches
from fault_child import break_at
from lanes import in_lanes
from saving import FORMATS, Saved, load, save, send_all_away
from spies import note
from storage_meter import PART_BYTES, SMALL, StorageMeter, engine, masters, metered, two_parts, weights_and_gradients
from test_parity import BF16_MOMENTS, FP16_MASTERS, FP16_MOMENTS
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import bridge_fgo
from bridge_fgo.states.fsdp import FsdpSource
from harness.arms.final_state import mcore_optimizers

pytestmark = pytest.mark.usefixtures("small_parts", "cpu_standins")

PARTS = bridge_fgo.OffloadConfig(engine="native", master_remainders=True)
"""Some 20 parts of the states, none larger than those of the largest tensor."""


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr("bridge_fgo.memory.layout.LEAST_PART_BYTES", PART_BYTES)


def training(offload, config=PARTS, **options):
    return both_module.training(offload, config, **SMALL | options)


def both(script, config=PARTS, **options):
    return both_module.both(script, config, **SMALL | options)


# Building.


@contextlib.contextmanager
def measured_build():
    """Context in which the build of an optimizer is measured; gives a list of peaks in bytes, one for each."""
    from megatron.bridge.training import setup

    original, peaks = setup.setup_optimizer, []

    def build(optimizer_config, scheduler_config, model, **kwargs):
        with StorageMeter(weights_and_gradients(model)) as meter:
            result = original(optimizer_config, scheduler_config, model, **kwargs)
        peaks.append(meter.peak)
        return result

    with mock.patch.object(setup, "setup_optimizer", build):
        yield peaks


WHOLE = {
    "adam": OPTIMIZERS["adam"],
    "adam_fp32_params": {"distributed": False, "precision": "fp32_params"},
    "adam_experts": {"distributed": False, "experts": True},
    "muon": OPTIMIZERS["muon"],
    "dist_muon": OPTIMIZERS["dist_muon"],
}
"""Under Float16OptimizerWithFloat16Params: masters of whole parameters."""
BUILT = {
    "dense": {},
    "experts": {"experts": True},
    "fp32_params": {"precision": "fp32_params"},
    "chunks": {"chunks": 2, "layers": 4},
    "frozen": {"frozen": True, "layers": 24},
    **WHOLE,
}


@pytest.mark.parametrize("kind", in_lanes(BUILT, ("dense", "dist_muon")))
def test_building_holds_two_parts_of_the_states_at_most_and_builds_what_a_resident_run_has(kind):
    def built(run):
        if run.options.offload:
            assert run.live_state_bytes() == 0
            assert peaks[1] <= two_parts() < all_masters[0] / 2
        else:
            all_masters.append(sum(master.nbytes for master in masters(run)))
            assert peaks[0] >= all_masters[0]
        return bits(run), steps(run, 2)

    all_masters = []
    with measured_build() as peaks:
        both(built, **BUILT[kind])


@pytest.mark.parametrize(
    "share", [pytest.param({"master_weights": False}, marks=pytest.mark.slow), {"fraction": 0.5}], ids=str
)
def test_masters_that_stay_on_the_device_are_made_there(share):
    def built(run):
        held = run.live_state_bytes()
        assert not run.options.offload or 0 < held <= sum(master.nbytes for master in masters(run))
        return bits(run), steps(run, 2)

    both(built, bridge_fgo.OffloadConfig(engine="native", **share))


def test_masters_are_made_at_once_if_nothing_is_offloaded_else_reload_states_brings_them():
    with bridge_fgo.install(PARTS), training(False) as run:
        assert run.live_state_bytes() == sum(master.nbytes for master in masters(run)) > 0
    with training(False) as run:
        expected = [master.clone() for master in masters(run)]
    with training(True) as run:
        assert {master.untyped_storage().nbytes() for master in masters(run)} == {0}, "a read would end the process"
        bridge_fgo.reload_states()
        assert all(torch.equal(*pair) for pair in zip(masters(run), expected, strict=True))


@pytest.mark.parametrize("kind", ["dense", pytest.param("muon", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fails", ["megatron.bridge.training.optim._get_scheduler", "bridge_fgo.bridge.before_training.attach"]
)
def test_a_build_that_fails_leaves_a_model_that_can_be_given_another_optimizer(fails, kind):
    from megatron.bridge.training import setup

    with training(False, **BUILT[kind]) as run:
        expected = [master.clone() for master in masters(run)]
        run.cfg.optimizer.offload_optimizer_states = True
        how = (run.cfg.optimizer, run.cfg.scheduler, run.model)
        with bridge_fgo.install(PARTS):
            with mock.patch(fails, side_effect=KeyError("no")), pytest.raises(KeyError, match="no"):
                setup.setup_optimizer(*how)
            weights = [p for chunk in run.model for p in chunk.parameters() if p.dtype == torch.bfloat16]
            assert all(weight.main_param is None for weight in weights)
            run.optimizer, run.scheduler = setup.setup_optimizer(*how)
            bridge_fgo.reload_states()
            assert all(torch.equal(*pair) for pair in zip(masters(run), expected, strict=True))


def test_optimizers_that_are_put_into_another_chain_keep_their_masters():
    from megatron.bridge.training import setup
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    def chained_anew(run):
        first = session_of(run) if run.options.offload else None
        run.optimizer = ChainedOptimizer(list(mcore_optimizers(run.optimizer)))
        setup._update_model_config_funcs(run.model, run.cfg.model, run.cfg.ddp, run.optimizer, pg_collection=run.groups)
        assert first is None or (first.closed and session_of(run) is not first)
        return steps(run, 2)

    both(chained_anew)


# Loading.

DTYPES = {
    "masters in mcore": "te",
    "precision-aware": {"store_param_remainders": False},
    "precision-aware, bf16 moments": {"store_param_remainders": False} | BF16_MOMENTS,
    "fp16 masters": FP16_MASTERS | BF16_MOMENTS,
    "remainders": {"store_param_remainders": True} | BF16_MOMENTS,
}
FSDP = {"fsdp": "optim_grads_params", "adam": "te"}
LOADED = {
    # An optimizer of experts is one of dense parameters too.
    **{name: {"experts": True, "adam": adam} for name, adam in DTYPES.items()},
    "fsdp of swiglu": FSDP | {"swiglu": True},
    "fsdp": FSDP,
    "fsdp of experts": FSDP | {"experts": True, "layers": 6},
    **{strategy: FSDP | {"fsdp": strategy} for strategy in ("optim_grads", "optim", "no_shard")},
    "fsdp with torch's adam": FSDP | {"adam": None},
    "fsdp, bf16 moments": FSDP | {"adam": BF16_MOMENTS},
    "fsdp, fp32 moments, decoupled gradients": FSDP | {"adam": {}},
    "fsdp, fp16 moments": FSDP | {"adam": FP16_MOMENTS},
}
FEW_PARTS = ("optim", "no_shard", "optim_grads")
"""A part is the whole model, or near it: gradients are not reduced layer by layer."""


def formats_of(kind):
    if kind == "remainders":
        return FORMATS[1:]  # of the other mcore saves remainders as fp32, and Transformer Engine refuses to load them
    return FORMATS if kind in DTYPES else FORMATS[:1]


@pytest.fixture(scope="module")
def saved(cpu_standins, tmp_path_factory):
    """A function that saves a resident run of a kind, once."""

    @functools.cache
    def save_once(kind):
        with training(False, **LOADED[kind]) as run:
            steps(run, 2)
            folders = {format: tmp_path_factory.mktemp("saved") for format in formats_of(kind)}
            for format, folder in folders.items():
                save(run, folder, format)
            return Saved(folders, bits(run), steps(run, 2), bits(run))

    return save_once


LOADS = [
    (kind, format)
    for kind in LOADED
    if kind not in ("fsdp", "fsdp, fp16 moments")  # the first is in others; of the second all states are there
    for format in formats_of(kind)
]


@pytest.mark.parametrize(("kind", "format"), in_lanes(LOADS, [("remainders", FORMATS[1])]))
def test_loading_holds_no_more_of_the_states_than_two_parts_and_loads_every_bit(saved, kind, format):
    before, resident = saved(kind), None
    if kind == "fsdp of swiglu":
        with training(False, **LOADED[kind]) as run, metered(run) as meter:
            load(run, before.folders[format])
            resident = meter.look()
    with training(True, **LOADED[kind]) as run:
        with metered(run) as meter:
            load(run, before.folders[format])
        assert run.live_state_bytes() == 0 < meter.peak <= two_parts()
        if kind not in FEW_PARTS:
            assert two_parts() < engine().state_bytes / 3
            assert resident is None or resident >= engine().state_bytes
        assert bits(run) == before.bits
        before.goes_on_in(run)
    if kind == "fp16 masters":
        assert "torch.float16" in {value[0] for name, value in before.bits.items() if name.startswith("masters")}


@pytest.mark.parametrize("kind", ["masters in mcore", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_load_of_weights_alone_makes_no_moments_and_rewrites_the_masters_part_by_part(saved, kind):
    folder = saved(kind).folders[FORMATS[0]]

    def loaded(run):
        run.cfg.checkpoint.load_optim = False
        with metered(run) as meter:
            load(run, folder)
        assert not run.options.offload or run.live_state_bytes() == 0 < meter.peak <= two_parts()
        found = bits(run)
        assert not [name for name in found if name.startswith("moments")]
        return found, steps(run, 2)

    both(loaded, **LOADED[kind])


@pytest.mark.parametrize("count", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_what_mcore_makes_before_a_load_is_made_part_by_part_and_counts_and_decays_as_ever(count):
    def made(run):
        for group in run.optimizer.optimizer.param_groups:
            group["lr"] = 0.25  # a warm-up begins with 0, by which nothing would decay
        steps(run, count)
        run.model[0].state_dict()  # by which the optimizer's parameters are the model's
        send_all_away()
        with metered(run) as meter:
            names = run.optimizer.sharded_state_dict(is_loading=True, sharding_type="fsdp_dtensor")["state"]
        if run.options.offload:
            assert run.live_state_bytes() == 0 < meter.peak <= two_parts() < engine().state_bytes / 3
        return list(names)

    both(made, **FSDP)


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 2])
def test_a_checkpoint_without_states_leaves_what_mcore_made(tmp_path, count):
    with training(False, **FSDP) as run:
        steps(run, 2)
        run.cfg.checkpoint.save_optim = False
        save(run, tmp_path)

    def loaded(run):
        steps(run, count)
        load(run, tmp_path)
        return bits(run), steps(run, 2)

    both(loaded, **FSDP)


SHARES = [{"fraction": 0.5}, {"moments": False}, {"master_weights": False}]


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["debug mode", "a hook on the step", "quantized weights", *SHARES], ids=str)
def test_a_load_is_bitwise_a_resident_runs_in(saved, monkeypatch, cause):
    """In debug mode a host buffer is overwritten as soon as its slab has come back, also if nothing writes the slab.

    With a hook or quantized weights a step, or the copy to the weights, cannot be divided. Of a share of the states the
    rest is loaded where it stays.
    """
    before, called, share = saved("fsdp"), [], cause if cause in SHARES else {}
    if cause == "debug mode":
        monkeypatch.setenv("BRIDGE_FGO_DEBUG", "1")
    elif cause == "quantized weights":
        monkeypatch.setattr(FsdpSource, "writes_back_by_part", False)
    config = bridge_fgo.OffloadConfig(engine="native", **share) if share else PARTS
    with training(True, config, **FSDP) as run:
        if cause == "a hook on the step":
            run.optimizer.optimizer.register_step_post_hook(lambda *of_step: called.append(of_step))
        load(run, before.folders[FORMATS[0]])
        held = run.live_state_bytes()
        assert (held > 0) == bool(share)
        bridge_fgo.reload_states()
        assert not share or held <= run.live_state_bytes() - engine().planned_bytes  # with Megatron-FSDP's padding
        assert bits(run) == before.bits
        before.goes_on_in(run)
        assert len(called) == 3 * (cause == "a hook on the step")


def kinds_of(found, *kinds):
    chosen = {name: value for name, value in found.items() if name.startswith(kinds)}
    assert chosen
    return chosen


@pytest.mark.slow
def test_a_load_that_is_given_no_optimizer_reaches_its_masters_and_holds_two_parts(saved):
    from megatron.bridge.training.checkpointing import load_checkpoint

    before = saved("fsdp")
    with training(True, **FSDP) as run:
        steps(run)
        send_all_away()
        run.cfg.checkpoint.load = str(before.folders[FORMATS[0]])
        with metered(run) as meter:
            load_checkpoint(run.state, run.model, None, None)
        assert meter.peak <= two_parts()
        assert kinds_of(bits(run), "masters", "params") == kinds_of(before.bits, "masters", "params")


@pytest.mark.slow
def test_a_checkpoint_that_somebody_else_reads_reaches_the_states_wherever_they_are(saved):
    from megatron.bridge.training import checkpointing

    before = saved("fsdp")
    with training(True, **FSDP) as run:
        steps(run)
        metadata = checkpointing._build_sharded_state_dict_metadata(True, run.cfg.checkpoint)
        state_dict = checkpointing.generate_state_dict(
            run.cfg.checkpoint, run.model, run.optimizer, run.scheduler, None,
            optim_sd_kwargs={"metadata": metadata, "is_loading": True}, pg_collection=run.groups,
        )  # fmt: skip
        bridge_fgo.reload_states()
        checkpointing.load_fsdp_dtensor_checkpoint(
            str(before.folders[FORMATS[0]]), run.cfg.checkpoint, False, {**state_dict, "_model": run.model}, 2,
            cfg=run.cfg,
        )  # fmt: skip
        assert kinds_of(bits(run), "masters", "moments") == kinds_of(before.bits, "masters", "moments")


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 40])
def test_nothing_uses_half_loaded_states_until_a_whole_checkpoint_is_loaded(saved, tmp_path, monkeypatch, call):
    from megatron.core.rerun_state_machine import RerunDataIterator

    before = saved("fsdp")
    folder = before.folders[FORMATS[0]]

    def loaded(run):
        steps(run)
        if run.options.offload:
            with monkeypatch.context() as patch:
                break_at("a tensor is loaded", call, "failed", patch.setattr)
                with pytest.raises(BaseException, match="a tensor is loaded"):  # no Exception of PyTorch's
                    load(run, folder)
            for use in (run.step, lambda: save(run, tmp_path)):
                with pytest.raises(RuntimeError, match="the load of a checkpoint ended in an error"):
                    use()
            assert not list(tmp_path.glob("*/*.distcp"))
        load(run, folder)
        assert bits(run) == before.bits
        run._batches = RerunDataIterator(microbatches(run.options))
        return steps(run, 2)

    both(loaded, **FSDP)


@pytest.mark.slow
def test_states_that_are_not_the_optimizers_own_are_copied_into_it():
    def copied(run):
        steps(run, 2)
        run.model[0].state_dict()
        bridge_fgo.reload_states()
        given = run.optimizer.sharded_state_dict(sharding_type="fsdp_dtensor")
        halved = {
            name: {key: value.clone() / 2 for key, value in of_param.items()}
            for name, of_param in given["state"].items()
        }
        send_all_away()
        run.optimizer.load_state_dict({**given, "state": halved})
        return bits(run), steps(run, 2)

    both(copied, **FSDP)


@pytest.mark.slow
def test_moments_in_fp16_are_scaled_anew_as_in_a_resident_run(saved):
    folder = saved("fsdp, fp16 moments").folders[FORMATS[0]]

    def loaded(run):
        load(run, folder)
        return bits(run), steps(run, 2)

    both(loaded, **LOADED["fsdp, fp16 moments"])


@pytest.mark.slow
def test_gated_layers_whose_layout_is_changed_are_loaded_as_in_a_resident_run(saved, monkeypatch):
    from megatron.core.utils import get_model_config

    before = saved("fsdp of swiglu")
    monkeypatch.setenv("USE_ACT_FUSION_FOR_DENSE", "1")

    def loaded(run):
        get_model_config(run.model[0]).moe_mlp_glu_interleave_size = 4
        load(run, before.folders[FORMATS[0]])
        assert not run.options.offload or run.live_state_bytes() == 0
        found = bits(run)
        assert found != before.bits
        return found

    both(loaded, **LOADED["fsdp of swiglu"])


@pytest.mark.slow
def test_no_state_is_on_the_device_while_a_checkpoint_is_read_wherever_they_were_before(saved, monkeypatch):
    held, before = [], saved("fsdp")
    with training(True, **FSDP) as run:
        steps(run)
        bridge_fgo.reload_states()
        assert run.live_state_bytes() >= engine().state_bytes
        note(monkeypatch, held, DefaultLoadPlanner, "commit_tensor", lambda *_: run.live_state_bytes())
        load(run, before.folders[FORMATS[0]])
        assert held and max(held) == 0
        assert bits(run) == before.bits
