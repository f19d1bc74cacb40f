"""A checkpoint is loaded under Megatron-FSDP with no more of its states on the device than two parts, bit for bit."""

from __future__ import annotations

import contextlib

import children
import fsdp_meter
import fused_adam
import pytest
import rank_child
import torch
from comparing import assert_equal, trained
from fsdp_meter import SMALL, engine, metered, two_parts
from saving import load, save, send_all_away
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import bridge_fgo
from bridge_fgo.states.fsdp import GroupCopy
from bridge_fgo.tools.arms.cpu_model import microbatches
from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining
from bridge_fgo.tools.arms.final_state import mcore_optimizers

pytestmark = pytest.mark.usefixtures("cpu_standins", "small_parts")

CONFIG = bridge_fgo.OffloadConfig(engine="native")
HALF_MOMENTS = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
KINDS = {
    "swiglu": {"swiglu": True},
    "experts": {"experts": True, "layers": 6},
    "optim_grads": {"fsdp": "optim_grads"},
    "optim": {"fsdp": "optim"},
    "no_shard": {"fsdp": "no_shard"},
    "torch": {"te": False},
    "bf16 moments": {"adam": HALF_MOMENTS},
    "fp32 moments, decoupled gradients": {"adam": {}},
}
FEW_PARTS = ("optim", "no_shard", "optim_grads")
"""A part is the whole model, or near it: gradients are not reduced layer by layer."""


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr("bridge_fgo.memory.layout.LEAST_PART_BYTES", fsdp_meter.PART_BYTES)


@contextlib.contextmanager
def training(offload, te=True, adam=None, config=CONFIG, **changes):
    """A CPU training whose Adam is like Transformer Engine's, precision-aware where `adam` says of what dtypes."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if adam is not None:
            fused_adam.have_trainings_ask_for(adam, patch.setattr)
            fused_adam.have_mcore_make_it_precision_aware(patch)
        elif te:
            fused_adam.have_mcore_take_it(patch.setattr)
        if offload:
            stack.enter_context(bridge_fgo.install(config))
        yield stack.enter_context(CpuTraining(CpuOptions(offload=offload, **SMALL | changes)))


def everything(run):
    """Every weight, master and moment, and the counts of steps."""
    bridge_fgo.reload_states()
    # Clones: a tensor that numpy reads, as digests do, could not be emptied any more.
    found = {f"{kind}.{name}": tensor.clone() for kind, pairs in run.state_tensors().items() for name, tensor in pairs}
    for leaf in mcore_optimizers(run.optimizer):
        for index, group in enumerate(leaf.optimizer.param_groups):
            found[f"{index}.step"] = torch.tensor(group.get("step", -1))
            counts = [leaf.optimizer.state.get(param, {}).get("step") for param in group["params"]]
            found[f"{index}.steps"] = torch.tensor([-1.0 if count is None else float(count) for count in counts])
    return found


def saved_after_two_steps(folder, **options):
    """Train, save, and train on; return what was saved, and the numbers and the end from there on."""
    with training(False, **options) as run:
        trained(run, 2)
        save(run, folder)
        return everything(run), trained(run, 2), everything(run)


def resume(run):
    """Take the batches that were trained on."""
    for _ in range(2 * run.options.microbatches):
        next(run._batches)
    run._batches.advance()


@pytest.mark.parametrize(
    "kind", [kind if kind == "swiglu" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_load_holds_no_more_of_the_states_than_two_parts_and_every_bit_is_a_resident_runs(tmp_path, kind):
    options = KINDS[kind]
    then, numbers, end = saved_after_two_steps(tmp_path, **options)
    with training(False, **options) as run:
        with metered(run) as meter:
            load(run, tmp_path)
        resident = meter.peak
    with training(True, **options) as run:
        with metered(run) as meter:
            load(run, tmp_path)
        assert run.live_state_bytes() == 0
        assert 0 < meter.peak <= two_parts()
        if kind not in FEW_PARTS:
            assert two_parts() < engine().state_bytes / 4 < resident / 4
        assert_equal(everything(run), then)
        resume(run)
        assert trained(run, 2) == numbers
        assert_equal(everything(run), end)


@pytest.mark.slow
def test_a_load_trusts_no_host_copy_of_what_was_on_the_device_in_debug_mode(tmp_path, monkeypatch):
    """There a host buffer is overwritten as soon as its slab has come back, also if nothing writes the slab."""
    then, numbers, _ = saved_after_two_steps(tmp_path)
    monkeypatch.setenv("BRIDGE_FGO_DEBUG", "1")
    with training(True) as run:
        load(run, tmp_path)
        assert_equal(everything(run), then)
        resume(run)
        assert trained(run, 2) == numbers


def made(run, steps):
    """Have mcore make the states that a load overwrites, with states as they are after some steps."""
    trained(run, steps)
    run.model[0].state_dict()  # by which the optimizer's parameters are the model's
    send_all_away()
    with metered(run) as meter:
        names = run.optimizer.sharded_state_dict(is_loading=True, sharding_type="fsdp_dtensor")["state"]
    return meter.peak, list(names)


@pytest.mark.parametrize("steps", [0, 2])
def test_what_mcore_makes_before_a_load_is_made_part_by_part_and_counts_and_decays_as_ever(steps):
    seen = {}
    for offload in (False, True):
        with training(offload) as run:
            for group in run.optimizer.optimizer.param_groups:
                group["lr"] = 0.25  # a warm-up begins with 0, by which nothing would decay
            peak, names = made(run, steps)
            if offload:
                assert run.live_state_bytes() == 0 < peak <= two_parts() < engine().state_bytes / 4
            seen[offload] = names, everything(run)
    assert seen[True][0] == seen[False][0]
    assert_equal(seen[True][1], seen[False][1])


@pytest.mark.parametrize("steps", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_checkpoint_without_states_leaves_what_mcore_made(tmp_path, steps):
    with training(False) as run:
        trained(run, 2)
        run.cfg.checkpoint.save_optim = False
        save(run, tmp_path)
    seen = {}
    for offload in (False, True):
        with training(offload) as run:
            trained(run, steps)
            load(run, tmp_path)
            loaded = everything(run)
            seen[offload] = loaded, trained(run, 2), everything(run)
    assert_equal(seen[True][0], seen[False][0])
    assert seen[True][1] == seen[False][1]
    assert_equal(seen[True][2], seen[False][2])


@pytest.mark.slow
def test_a_load_of_weights_alone_makes_no_moments_and_holds_two_parts(tmp_path):
    saved_after_two_steps(tmp_path)
    seen = {}
    for offload in (False, True):
        with training(offload) as run:
            run.cfg.checkpoint.load_optim = False
            with metered(run) as meter:
                load(run, tmp_path)
            if offload:
                assert run.live_state_bytes() == 0 < meter.peak <= two_parts()
            loaded = everything(run)
            assert not [name for name in loaded if name.startswith("moments")]
            seen[offload] = loaded, trained(run, 2), everything(run)
    assert_equal(seen[True][0], seen[False][0])
    assert seen[True][1] == seen[False][1]
    assert_equal(seen[True][2], seen[False][2])


@pytest.mark.slow
def test_a_load_that_is_given_no_optimizer_reaches_its_masters_and_holds_two_parts(tmp_path):
    from megatron.bridge.training.checkpointing import load_checkpoint

    then, _, _ = saved_after_two_steps(tmp_path)
    with training(True) as run:
        trained(run, 1)
        send_all_away()
        run.cfg.checkpoint.load = str(tmp_path)
        with metered(run) as meter:
            load_checkpoint(run.state, run.model, None, None)
        assert meter.peak <= two_parts()
        loaded = everything(run)
    weights = [name for name in then if name.startswith(("masters", "params"))]
    assert weights and [name for name in weights if not torch.equal(loaded[name], then[name])] == []


@pytest.mark.slow
def test_a_checkpoint_that_somebody_else_reads_reaches_the_states_wherever_they_are(tmp_path):
    from megatron.bridge.training import checkpointing

    then, _, _ = saved_after_two_steps(tmp_path)
    with training(True) as run:
        trained(run, 1)
        metadata = checkpointing._build_sharded_state_dict_metadata(True, run.cfg.checkpoint)
        state_dict = checkpointing.generate_state_dict(
            run.cfg.checkpoint,
            run.model,
            run.optimizer,
            run.scheduler,
            None,
            optim_sd_kwargs={"metadata": metadata, "is_loading": True},
            pg_collection=run.groups,
        )
        bridge_fgo.reload_states()
        checkpointing.load_fsdp_dtensor_checkpoint(
            str(tmp_path), run.cfg.checkpoint, False, {**state_dict, "_model": run.model}, 2, cfg=run.cfg
        )
        loaded = everything(run)
    states = [name for name in then if name.startswith(("masters", "moments"))]
    assert states and [name for name in states if not torch.equal(loaded[name], then[name])] == []


def break_the_reader_at(call, patch):
    """Have the reader fail after that many tensors."""
    commit, left = DefaultLoadPlanner.commit_tensor, call

    def broken(planner, read_item, tensor):
        nonlocal left
        left -= 1
        if not left:
            raise KeyError("the reader is broken")
        commit(planner, read_item, tensor)

    patch.setattr(DefaultLoadPlanner, "commit_tensor", broken)


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 40])
def test_nothing_uses_states_that_are_half_loaded_until_a_whole_checkpoint_is_loaded(tmp_path, monkeypatch, call):
    from megatron.core.rerun_state_machine import RerunDataIterator

    then, _, _ = saved_after_two_steps(tmp_path / "saved")
    ends = {}
    for offload in (False, True):
        with training(offload) as run:
            trained(run, 1)
            if offload:
                with monkeypatch.context() as patch:
                    break_the_reader_at(call, patch)
                    with pytest.raises(BaseException, match="the reader is broken"):  # no Exception of PyTorch's
                        load(run, tmp_path / "saved")
                for use in (run.step, lambda run=run: save(run, tmp_path / "half")):
                    with pytest.raises(RuntimeError, match="the load of a checkpoint ended in an error"):
                        use()
                assert not list((tmp_path / "half").glob("*/*.distcp"))
            load(run, tmp_path / "saved")
            assert_equal(everything(run), then)
            run._batches = RerunDataIterator(microbatches(run.options))
            ends[offload] = trained(run, 2), everything(run)
    assert ends[True][0] == ends[False][0]
    assert_equal(ends[True][1], ends[False][1])


@pytest.mark.slow
def test_states_that_are_not_the_optimizers_own_are_copied_into_it(tmp_path):
    ends = {}
    for offload in (False, True):
        with training(offload) as run:
            trained(run, 2)
            run.model[0].state_dict()
            bridge_fgo.reload_states()
            given = run.optimizer.sharded_state_dict(sharding_type="fsdp_dtensor")
            halved = {
                name: {key: value.clone() / 2 for key, value in of_param.items()}
                for name, of_param in given["state"].items()
            }
            send_all_away()
            run.optimizer.load_state_dict({**given, "state": halved})
            ends[offload] = everything(run), trained(run, 2), everything(run)
    assert_equal(ends[True][0], ends[False][0])
    assert ends[True][1] == ends[False][1]
    assert_equal(ends[True][2], ends[False][2])


@pytest.mark.slow
@pytest.mark.parametrize("whole", ["a hook on the step", "quantized weights"])
def test_where_a_step_or_the_copy_to_weights_cannot_be_divided_every_bit_is_a_resident_runs(
    tmp_path, monkeypatch, whole
):
    then, numbers, end = saved_after_two_steps(tmp_path)
    if whole == "quantized weights":
        monkeypatch.setattr(GroupCopy, "divides", lambda copy: False)
    with training(True) as run:
        called = []
        if whole == "a hook on the step":
            run.optimizer.optimizer.register_step_post_hook(lambda *of_step: called.append(of_step))
        load(run, tmp_path)
        assert run.live_state_bytes() == 0
        assert_equal(everything(run), then)
        resume(run)
        assert trained(run, 2) == numbers
        assert_equal(everything(run), end)
        assert len(called) == 3 * (whole == "a hook on the step")


@pytest.mark.slow
def test_moments_in_fp16_are_scaled_anew_as_in_a_resident_run(tmp_path):
    half = dict.fromkeys(HALF_MOMENTS, torch.float16)
    saved_after_two_steps(tmp_path, adam=half)
    ends = {}
    for offload in (False, True):
        with training(offload, adam=half) as run:
            load(run, tmp_path)
            ends[offload] = everything(run), trained(run, 2), everything(run)
    assert_equal(ends[True][0], ends[False][0])
    assert ends[True][1] == ends[False][1]
    assert_equal(ends[True][2], ends[False][2])


@pytest.mark.slow
def test_gated_layers_whose_layout_is_changed_are_loaded_as_in_a_resident_run(tmp_path, monkeypatch):
    from megatron.core.utils import get_model_config

    monkeypatch.setenv("USE_ACT_FUSION_FOR_DENSE", "1")
    then, _, _ = saved_after_two_steps(tmp_path, swiglu=True)
    ends = {}
    for offload in (False, True):
        with training(offload, swiglu=True) as run:
            get_model_config(run.model[0]).moe_mlp_glu_interleave_size = 4
            load(run, tmp_path)
            assert not offload or run.live_state_bytes() == 0
            ends[offload] = everything(run)
    assert_equal(ends[True], ends[False])
    assert [name for name in then if not torch.equal(ends[True][name], then[name])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["swiglu", "experts"])
def test_two_ranks_load_with_two_parts_each_and_go_on_as_resident_ones(tmp_path, kind):
    changes = SMALL | KINDS[kind]
    saved = rank_child.Job(tmp_path / "saved", 2, False, None, 2, changes)
    children.run_ranks(rank_child.train, saved)
    seen = {}
    for offload in (False, True):
        job = rank_child.Job(tmp_path / str(offload), 2, offload, saved.folder / "trained", 2, changes)
        seen[offload] = children.run_ranks(fsdp_meter.load_on_rank, job)
    for resident, offloaded in zip(seen[False], seen[True], strict=True):
        assert (offloaded["numbers"], offloaded["digests"]) == (resident["numbers"], resident["digests"])
        assert offloaded["held"] == 0 < resident["held"]
        assert 0 < offloaded["peak"] <= offloaded["allowed"] < offloaded["state_bytes"] / 4 < resident["peak"] / 4


@pytest.mark.parametrize(
    "some",
    [
        pytest.param({"fraction": 0.5}, marks=pytest.mark.slow),
        pytest.param({"moments": False}, marks=pytest.mark.slow),
        pytest.param({"master_weights": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_share_of_the_states_is_loaded_in_host_memory_and_the_rest_where_it_stays(tmp_path, some):
    then, numbers, end = saved_after_two_steps(tmp_path)
    with training(True, config=bridge_fgo.OffloadConfig(engine="native", **some)) as run:
        load(run, tmp_path)
        held = run.live_state_bytes()
        assert_equal(everything(run), then)
        assert 0 < held <= run.live_state_bytes() - engine().planned_bytes  # with Megatron-FSDP's padding
        resume(run)
        assert trained(run, 2) == numbers
        assert_equal(everything(run), end)


@pytest.mark.slow
def test_no_state_is_on_the_device_while_a_checkpoint_is_read_wherever_they_were_before(tmp_path, monkeypatch):
    then, _, _ = saved_after_two_steps(tmp_path)
    commit, held = DefaultLoadPlanner.commit_tensor, []
    with training(True) as run:
        trained(run, 1)
        bridge_fgo.reload_states()
        assert run.live_state_bytes() >= engine().state_bytes

        def commit_tensor(planner, read_item, tensor):
            held.append(run.live_state_bytes())
            commit(planner, read_item, tensor)

        monkeypatch.setattr(DefaultLoadPlanner, "commit_tensor", commit_tensor)
        load(run, tmp_path)
        assert held and max(held) == 0
        assert_equal(everything(run), then)
