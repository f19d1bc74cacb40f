"""Megatron-FSDP through Bridge's own train_step, resident and offloaded, bit for bit, with its checkpoints."""

from __future__ import annotations

import itertools

import fused_adam
import pytest
import torch
from both import both
from saving import load, newest, save, send_all_away
from test_checkpoints import assert_same_shards

import bridge_fgo
from bridge_fgo.states.fsdp import GroupCopy
from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining

pytestmark = pytest.mark.usefixtures("cpu_standins")

CONFIG = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20, piece_bytes=2**16)
WHOLE = {"fsdp": "optim_grads_params"}
KINDS = {"dense": {}, "experts": {"experts": True}, "swiglu": {"swiglu": True}}
TROUBLE = {"rerun_steps": frozenset({2}), "grad_norm_skip_steps": frozenset({3})}
STEPS = 12


def test_steps_reruns_and_skips_of_sharded_experts_are_bitwise_equal_to_resident():
    resident, record, stats = both(CONFIG, 5, **WHOLE, **KINDS["experts"], **TROUBLE)
    assert record.peak_forward_backward_bytes == 0 < resident.peak_forward_backward_bytes
    assert stats.released_bytes >= stats.state_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kind"), itertools.product(("no_shard", "optim", "optim_grads", "optim_grads_params"), KINDS)
)
def test_12_steps_of_each_sharding_are_bitwise_equal_to_resident(strategy, kind):
    _, record, stats = both(CONFIG, STEPS, fsdp=strategy, **KINDS[kind], **TROUBLE)
    assert record.peak_forward_backward_bytes == 0
    assert stats.released_bytes >= stats.state_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"moments": False}, {"master_weights": False}, {"fraction": 0.5}])
def test_a_share_of_the_states_is_bitwise_equal_and_keeps_the_rest(changes):
    config = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20, **changes)
    _, record, stats = both(config, 5, **WHOLE)
    # `record.state_bytes` is of storages, with Megatron-FSDP's padding.
    assert 0 < record.peak_forward_backward_bytes <= record.state_bytes - stats.offloaded_bytes


def test_the_step_goes_part_by_part_and_copies_each_part_to_the_weights(monkeypatch):
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import ParamAndGradBuffer

    copied, copy = [], ParamAndGradBuffer.copy_main_weights_to_model_weights

    def counted(buffer):
        copied.append(len(buffer.parameter_groups))
        copy(buffer)

    monkeypatch.setattr(ParamAndGradBuffer, "copy_main_weights_to_model_weights", counted)
    with bridge_fgo.install(CONFIG), CpuTraining(CpuOptions(offload=True, **WHOLE)) as training:
        training.step()
        (engine,) = {session.engine for session in bridge_fgo.bridge.session.all_sessions()}
        assert len(engine.schedule.parts) == 3
    assert copied == [1, 1, 1, 0], "each group once, and nothing is left"


def test_masters_of_quantized_weights_stay_until_their_copy_which_is_one_for_all(monkeypatch):
    # As upstream's is: a collective over all groups.
    monkeypatch.setattr(GroupCopy, "divides", lambda copy: False)
    _, record, _ = both(CONFIG, 4, **WHOLE, layers=3)
    assert record.peak_forward_backward_bytes == 0


@pytest.fixture
def books_like_te(monkeypatch):
    """The Adam inside counts steps in the param group and makes views, as Transformer Engine's does."""
    fused_adam.have_mcore_take_it(monkeypatch.setattr)


def trained(options, folder=None, steps=3, loads=None, load_optim=True):
    """Load, train, save with every state away, and train on; return what was seen."""
    seen = {"held": [], "numbers": []}
    with bridge_fgo.install(CONFIG), CpuTraining(CpuOptions(**options)) as training:
        if loads is not None:
            training.cfg.checkpoint.load_optim = load_optim
            load(training, loads)
            seen["held"].append(training.live_state_bytes())
            for _ in range(3 * training.options.microbatches):
                next(training._batches)
        for _ in range(steps):
            step = training.step()
            seen["numbers"].append((step.loss, step.grad_norm))
            seen["most"] = max(training.live_bytes)
        if folder is not None:
            send_all_away()
            save(training, folder)
            if training.options.offload:
                assert training.live_state_bytes() == 0, "no state came to the GPU for the save"
            step = training.step()
            seen["after"] = (step.loss, step.grad_norm)
        seen["digests"] = training.digests()
    return seen


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=() if name == "swiglu" else pytest.mark.slow) for name in KINDS]
)
def test_a_checkpoint_has_a_resident_runs_bytes_and_loads_with_and_without_offload(tmp_path, kind, books_like_te):
    options = WHOLE | KINDS[kind]
    resident = trained(options, tmp_path / "resident")
    offloaded = trained({**options, "offload": True}, tmp_path / "offloaded")
    assert offloaded == {**resident, "held": [], "most": 0}
    assert_same_shards(tmp_path / "offloaded", tmp_path / "resident")
    for offload, saved in itertools.product((False, True), ("resident", "offloaded")):
        again = trained({**options, "offload": offload}, steps=1, loads=tmp_path / saved)
        assert again["numbers"] == [resident["after"]] and again["digests"] == resident["digests"]
        assert (again["held"] == [0]) == offload


def test_loading_without_the_optimizers_states_is_as_resident(tmp_path, books_like_te):
    options = WHOLE | KINDS["swiglu"]
    trained(options, tmp_path / "saved")
    resident, offloaded = (
        trained({**options, "offload": offload}, steps=2, loads=tmp_path / "saved", load_optim=False)
        for offload in (False, True)
    )
    assert offloaded["numbers"] == resident["numbers"] and offloaded["digests"] == resident["digests"]
    assert offloaded["most"] == 0 < resident["most"]


def test_a_save_before_the_first_step_is_a_resident_runs(tmp_path, books_like_te):
    for offload in (False, True):
        trained({**WHOLE, **KINDS["swiglu"], "offload": offload}, tmp_path / str(offload), steps=0)
    assert_same_shards(tmp_path / "True", tmp_path / "False")


def test_a_missing_shard_is_an_error_after_which_another_checkpoint_loads(tmp_path, books_like_te):
    options = {**WHOLE, "swiglu": True, "offload": True}
    resident = trained(WHOLE | KINDS["swiglu"], tmp_path / "whole")
    trained(options, tmp_path / "torn")
    (shard,) = newest(tmp_path / "torn").glob("*.distcp")
    shard.unlink()
    with bridge_fgo.install(CONFIG), CpuTraining(CpuOptions(**options)) as training:
        with pytest.raises(BaseException, match="No such file"):  # PyTorch's CheckpointException is no Exception
            load(training, tmp_path / "torn")
        load(training, tmp_path / "whole")
        assert training.live_state_bytes() == 0
        for _ in range(3 * training.options.microbatches):
            next(training._batches)
        step = training.step()
        assert (step.loss, step.grad_norm) == resident["after"]
        assert training.digests() == resident["digests"]


def test_whoever_asks_the_model_for_its_state_dictionary_between_steps_finds_the_masters(books_like_te):
    with bridge_fgo.install(CONFIG), CpuTraining(CpuOptions(offload=True, **WHOLE)) as training:
        training.step()
        send_all_away()
        assert training.live_state_bytes() == 0
        found = [value._local_tensor for value in training.model[0].state_dict().values() if torch.is_tensor(value)]
        assert found and all(tensor.untyped_storage().nbytes() for tensor in found if tensor.numel())
