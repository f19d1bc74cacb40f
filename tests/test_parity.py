"""Bridge's own train_step, resident and offloaded: 12 steps, bit for bit."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from both import both, numbers, resident
from torch.optim.optimizer import register_optimizer_step_post_hook

import bridge_fgo
from bridge_fgo.bridge.session import SESSION
from bridge_fgo.memory.slab import Slab
from bridge_fgo.sleep import upstream
from bridge_fgo.states.inner_step import InnerStep
from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining, run

pytestmark = pytest.mark.usefixtures("cpu_standins")

STEPS = 12
DEFAULTS = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20, piece_bytes=2**16)
SMALL_SLABS = dataclasses.replace(DEFAULTS, master_remainders=True)

SCENARIOS = {
    "plain": {},
    "two_model_chunks": {"chunks": 2},
    "two_model_chunks_with_overlapped_grad_reduce": {"chunks": 2, "overlap_grad_reduce": True},
    "chained_optimizers": {"experts": True},
    "native_fp32_parameters": {"precision": "fp32_params"},
    "fp16_with_loss_scaling": {"precision": "fp16"},
    "most_parameters_frozen": {"frozen": True},
    "injected_found_inf": {"found_inf_steps": frozenset({3, 4, 9})},
    "injected_rerun": {"rerun_steps": frozenset({2, 5, 6})},
    "grad_norm_skips": {"grad_norm_skip_steps": frozenset({2, 3, 11})},
    "all_at_once": {
        "chunks": 2,
        "experts": True,
        "found_inf_steps": frozenset({4}),
        "rerun_steps": frozenset({5, 7}),
        "grad_norm_skip_steps": frozenset({9}),
    },
}


OF_BF16 = [name for name, options in SCENARIOS.items() if options.get("precision") != "fp16"]
DEFAULT_SETTINGS = ["plain", "fp16_with_loss_scaling", "all_at_once"]
LONG = ("two_model_chunks", "all_at_once")
"""For the slow lane alone: what else trains in two chunks is in the fast one."""


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *(pytest.param(name, SMALL_SLABS, marks=pytest.mark.slow if name in LONG else ()) for name in OF_BF16),
        *(pytest.param(name, DEFAULTS, marks=pytest.mark.slow if name in LONG else ()) for name in DEFAULT_SETTINGS),
    ],
)
def test_12_steps_are_bitwise_equal_to_resident(name, config):
    _, record, stats = both(config, STEPS, **SCENARIOS[name])
    assert len(record.steps) == STEPS
    assert record.peak_forward_backward_bytes == 0, "every state was off during forward and backward"
    assert stats.released_bytes >= stats.state_bytes > 0
    assert stats.steps == STEPS


@pytest.mark.parametrize("fraction", [0.25, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_fraction_is_bitwise_equal_and_keeps_the_rest(fraction):
    config = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20, fraction=fraction)
    _, record, stats = both(config, STEPS)
    assert stats.offloaded_bytes >= fraction * stats.state_bytes
    left = record.peak_forward_backward_bytes
    assert 0 < left <= (1 - fraction) * stats.state_bytes


@pytest.mark.parametrize("kinds", [{"moments": False}, {"master_weights": False}])
def test_one_kind_alone_is_bitwise_equal(kinds):
    both(bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20, **kinds), 5)


def test_installed_but_never_enabled_is_the_run_without_it():
    expected = resident(5, experts=True)
    with bridge_fgo.install(SMALL_SLABS):
        record = run(CpuOptions(experts=True), 5)
    assert numbers(record) == numbers(expected)
    assert record.digests == expected.digests
    assert record.peak_forward_backward_bytes > 0


def test_an_early_exit_that_checkpoints_leaves_readable_and_right_states():
    _, record, _ = both(SMALL_SLABS, STEPS, checkpoint_exit_step=4)
    assert record.steps[-1].should_checkpoint


def test_a_second_pass_and_a_skipped_step_move_again_only_what_had_come_back():
    figures = []
    with bridge_fgo.install(SMALL_SLABS):
        options = CpuOptions(offload=True, rerun_steps=frozenset({3}), grad_norm_skip_steps=frozenset({4}))
        run(options, 6, lambda step: figures.append(bridge_fgo.stats()))
    assert [s.passes for s in figures] == [1, 1, 2, 1, 1, 1]
    whole = figures[1].bytes_reloaded
    assert 0.84 < whole / figures[1].offloaded_bytes < 0.87  # of masters 17 bits of 32
    came_back = figures[3].bytes_reloaded  # before the skipped update: what the step would have begun with
    assert 0 < came_back < whole
    moved = [(s.bytes_offloaded, s.bytes_reloaded) for s in figures[1:]]
    assert moved == [
        (whole, whole), (whole + came_back, whole + came_back), (0, came_back), (came_back + whole, whole),
        (whole, whole),
    ]  # fmt: skip


def test_stats_are_there_after_training_and_hold_no_memory():
    import gc
    import weakref

    with bridge_fgo.install(SMALL_SLABS):
        with CpuTraining(CpuOptions(offload=True)) as training:
            training.step()
            optimizer = weakref.ref(training.optimizer.chained_optimizers[0])
        del training
        gc.collect()
        assert optimizer() is None
        assert bridge_fgo.stats().steps == 1
    assert bridge_fgo.stats() is None


def residencies(session):
    """The residency of every slab."""
    return [slab.state for slab in session.engine.slabs]


def released(training):
    """Take a training to the point where its states are released, as in a forward pass."""
    session = vars(training.optimizer)[SESSION]
    session.begin_pass()
    session.release()
    assert training.live_state_bytes() == 0


def test_weights_that_are_loaded_while_offloaded_stay():
    # Without the gate the write goes into freed storage, and the next reload brings stale bytes.
    with bridge_fgo.install(SMALL_SLABS), CpuTraining(CpuOptions(offload=True)) as training:
        training.step()
        released(training)
        with torch.no_grad():
            for parameter in training.model[0].parameters():
                parameter.fill_(0.5)
        training.optimizer.reload_model_params()
        assert training.live_state_bytes() == 0, "masters that were away are written part by part, and leave again"
        bridge_fgo.reload_states()
        assert all(bool((t == 0.5).all()) for _, t in training.state_tensors()["masters"])
        vars(training.optimizer)[SESSION].begin_pass()
        vars(training.optimizer)[SESSION].release()
        training.optimizer.chained_optimizers[0].state_dict()
        assert all(bool((t == 0.5).all()) for _, t in training.state_tensors()["masters"])


def leaves(state):
    """Yield the tensors of nested dictionaries and lists."""
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict | list):
            yield from leaves(value)


def test_states_that_are_saved_while_offloaded_are_right():
    with bridge_fgo.install(SMALL_SLABS), CpuTraining(CpuOptions(offload=True)) as training:
        training.step()
        leaf = training.optimizer.chained_optimizers[0]
        before = leaf.get_parameter_state_dp_zero()
        released(training)
        after = leaf.get_parameter_state_dp_zero()

    pairs = list(zip(leaves(before), leaves(after), strict=True))
    assert pairs
    assert all(torch.equal(a, b) for a, b in pairs)


def with_a_load_in_mid_run(offload):
    """Train, load the optimizer's own state through mcore, train on; return the digests."""
    with CpuTraining(CpuOptions(offload=offload)) as training:
        leaf = training.optimizer.chained_optimizers[0]
        for _ in range(3):
            training.step()
        bridge_fgo.reload_states()
        moments = {name: tensor.clone() for name, tensor in training.state_tensors()["moments"]}
        states, saved = leaf.optimizer.state, leaf.state_dict()
        if offload:
            released(training)
        leaf.load_state_dict(saved)
        # Offloaded, states are loaded where they are.
        assert (leaf.optimizer.state is states) == offload
        bridge_fgo.reload_states()
        for name, tensor in training.state_tensors()["moments"]:
            tensor.copy_(moments[name])  # mcore fills its scaffold from the checkpoint's shards
        for _ in range(3):
            training.step()
            assert not offload or max(training.live_bytes) == 0
        return training.digests()


def test_a_checkpoint_load_while_offloaded_is_right_and_what_it_loaded_is_offloaded():
    # mcore's load_state_dict puts another dictionary in place of `optimizer.state`, with other tensors in it.
    resident = with_a_load_in_mid_run(offload=False)
    with bridge_fgo.install(SMALL_SLABS):
        assert with_a_load_in_mid_run(offload=True) == resident


def test_the_wrapped_step_that_train_still_holds_works_after_an_uninstall():
    from megatron.bridge.training import train as bridge_train

    expected = resident(4)
    handle = bridge_fgo.install(SMALL_SLABS)
    held = bridge_train.train_step
    with CpuTraining(CpuOptions(offload=True)) as training:
        for _ in range(2):
            training.step()
        handle.uninstall()
        with mock.patch.object(bridge_train, "train_step", held):
            for _ in range(2):
                training.step()
        assert training.digests() == expected.digests


def test_a_flag_that_is_unset_in_mid_run_brings_the_states_back():
    expected = resident(6)
    with bridge_fgo.install(SMALL_SLABS), CpuTraining(CpuOptions(offload=True)) as training:
        for _ in range(3):
            training.step()
        training.cfg.optimizer.offload_optimizer_states = False
        for _ in range(3):
            training.step()
        assert min(training.live_bytes) > 0
        assert training.digests() == expected.digests


def test_a_flag_that_is_unset_after_an_uninstall_and_another_install_has_nothing_to_bring_back():
    expected = resident(3)
    with CpuTraining(CpuOptions(offload=True)) as training:
        with bridge_fgo.install(SMALL_SLABS):
            for _ in range(2):
                training.step()
        with bridge_fgo.install(SMALL_SLABS):
            training.cfg.optimizer.offload_optimizer_states = False
            training.step()
            assert SESSION not in vars(training.optimizer)
        assert training.digests() == expected.digests


def test_uninstall_in_mid_run_lets_the_host_memory_go():
    import gc
    import weakref

    handle = bridge_fgo.install(SMALL_SLABS)
    with CpuTraining(CpuOptions(offload=True)) as training:
        for _ in range(2):
            training.step()
        session = vars(training.optimizer)[SESSION]
        buffers = [weakref.ref(slab.host) for slab in session.engine.slabs]
        copies = weakref.ref(session.engine.schedule.transfers)  # on a GPU they hold every slab
        handle.uninstall()
        gc.collect()
        assert buffers and all(buffer() is None for buffer in buffers)
        assert copies() is None
        training.step()


@pytest.mark.parametrize("cause", ["no memory", "weights changed"])
def test_an_uninstall_that_cannot_bring_the_states_back_leaves_all_as_it_was_and_may_be_called_again(
    monkeypatch, cause
):
    # Without the bindings the next step or save would meet tensors with no memory behind them.
    expected = resident(6)
    handle = bridge_fgo.install(SMALL_SLABS)
    with CpuTraining(CpuOptions(offload=True)) as training:
        for _ in range(3):
            training.step()
        session = vars(training.optimizer)[SESSION]
        with monkeypatch.context() as patch:
            if cause == "no memory":
                patch.setattr(Slab, "allocate", mock.Mock(side_effect=torch.cuda.OutOfMemoryError("none left")))
            else:
                session.engine.offload_now()
                weight = next(training.model[0].parameters())
                before = weight.detach().clone()
                weight.data.add_(1)
            with pytest.raises(RuntimeError, match="none left" if cause == "no memory" else "weights of the model"):
                bridge_fgo.uninstall()
        if cause == "weights changed":
            weight.data.copy_(before)
        assert bridge_fgo.install() is handle
        assert not session.closed
        training.step()
        handle.uninstall()
        assert session.closed
        for _ in range(2):
            training.step()
        assert training.digests() == expected.digests


def test_weights_that_change_after_an_uninstall_that_failed_are_found_before_the_update(monkeypatch):
    with bridge_fgo.install(SMALL_SLABS), CpuTraining(CpuOptions(offload=True)) as training:
        for _ in range(3):
            training.step()
        forward, weight, called = training._forward_step, next(training.model[0].parameters()), []

        def fails_to_uninstall(*args, **kwargs):
            if not called:
                with monkeypatch.context() as patch, pytest.raises(torch.cuda.OutOfMemoryError):
                    patch.setattr(Slab, "allocate", mock.Mock(side_effect=torch.cuda.OutOfMemoryError("none left")))
                    bridge_fgo.uninstall()
                weight.data.mul_(2)
            called.append(True)
            return forward(*args, **kwargs)

        training._forward_step = fails_to_uninstall
        with pytest.raises(RuntimeError, match="weights of the model were changed"):
            training.step()
        assert len(called) > 1, "it came after forward, from the update"
        weight.data.div_(2)


def test_an_uninstall_is_not_held_up_by_a_training_that_is_over():
    def train_and_change_weights():
        with CpuTraining(CpuOptions(offload=True)) as training:
            for _ in range(2):
                training.step()
            vars(training.optimizer)[SESSION].engine.offload_now()
            next(training.model[0].parameters()).data.add_(1)
            training.optimizer.cycle = training

    handle = bridge_fgo.install(SMALL_SLABS)
    train_and_change_weights()
    handle.uninstall()


def test_uninstall_in_the_first_forward_is_no_silent_no_op():
    expected = resident(2)
    handle = bridge_fgo.install(SMALL_SLABS)
    with CpuTraining(CpuOptions(offload=True)) as training:
        forward = training._forward_step

        def uninstalls(*args, **kwargs):
            handle.uninstall()
            return forward(*args, **kwargs)

        training._forward_step = uninstalls
        for _ in range(2):
            training.step()
        assert training.digests() == expected.digests


def test_an_uninstall_in_a_pass_that_is_run_again_is_bitwise_equal():
    # The rerun machine that Bridge's step has taken goes on telling of passes.
    expected = resident(3, rerun_steps=frozenset({2}))
    handle = bridge_fgo.install(SMALL_SLABS)
    with CpuTraining(CpuOptions(offload=True, rerun_steps=frozenset({2}))) as training:
        training.step()
        forward = training._forward_step

        def uninstalls(*args, **kwargs):
            handle.uninstall()
            return forward(*args, **kwargs)

        training._forward_step = uninstalls
        assert training.step().passes == 2
        training.step()
        assert bridge_fgo.stats() is None
        assert training.digests() == expected.digests


def test_the_norm_of_one_model_leaves_the_masters_of_another_where_they_are():
    from bridge_fgo.bridge import state_wrappers

    with bridge_fgo.install(SMALL_SLABS), CpuTraining(CpuOptions(offload=True)) as training:
        for _ in range(2):
            training.step()
        session = vars(training.optimizer)[SESSION]
        session.engine.offload_now()
        released = residencies(session)
        other = [torch.nn.Linear(2, 2)]
        assert session.trains(training.model) and not session.trains(other)
        another = mock.Mock(**{"trains.side_effect": lambda chunks: chunks is other})
        with mock.patch.object(state_wrappers, "all_sessions", lambda: [session, another]):
            state_wrappers.reads_all_masters(lambda model: None, None, (other,), {})
        another.engine.require_readable.assert_called_once_with(masters_only=True)
        assert residencies(session) == released


def test_uninstall_in_mid_run_brings_the_states_back():
    expected = resident(6)
    handle = bridge_fgo.install(SMALL_SLABS)
    with CpuTraining(CpuOptions(offload=True)) as training:
        for _ in range(3):
            training.step()
        handle.uninstall()
        for _ in range(3):
            training.step()
        assert training.digests() == expected.digests


def with_a_stub_in_a_nested_chain(offload):
    """Train with the optimizer two chains deep, beside a stub of a frozen sub-model; return numbers and digests."""
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    with CpuTraining(CpuOptions(offload=offload)) as training:
        real = training.optimizer.chained_optimizers[0]
        stub = DistributedOptimizer(
            None, real.config, None, None,
            model_chunks=training.model, per_model_buffers={}, data_parallel_group=real.data_parallel_group,
            data_parallel_group_gloo=None, data_parallel_group_idx=0, distributed_optimizer_instance_id=0,
        )  # fmt: skip
        stub.grad_stats_parallel_group = real.grad_stats_parallel_group
        stub.tp_group, stub.expert_tp_group = real.tp_group, real.expert_tp_group
        training.optimizer = ChainedOptimizer([ChainedOptimizer([real]), stub])
        steps = [training.step() for _ in range(5)]
        return [(s.loss, s.grad_norm, s.skipped) for s in steps], training.digests(), training.live_bytes


def test_a_nested_chain_with_a_stub_is_bitwise_equal():
    resident = with_a_stub_in_a_nested_chain(offload=False)
    with bridge_fgo.install(SMALL_SLABS):
        offloaded_run = with_a_stub_in_a_nested_chain(offload=True)
    assert offloaded_run[:2] == resident[:2]
    assert max(offloaded_run[2]) == 0 < min(resident[2])


def with_a_write_between_steps(offload, write):
    """Train, change states as a callback would, save, train on; return what is saved, and the digests."""
    with CpuTraining(CpuOptions(offload=offload)) as training:
        for _ in range(3):
            training.step()
        bridge_fgo.reload_states()
        adam = training.optimizer.chained_optimizers[0].optimizer
        with torch.no_grad():
            write(adam)
        saved = training.optimizer.chained_optimizers[0].get_parameter_state_dp_zero()
        for _ in range(3):
            training.step()
        return saved, training.digests()


def reset_moments(adam):
    for state in adam.state.values():
        state["exp_avg"].zero_()


def scale_masters(adam):
    for param in (param for group in adam.param_groups for param in group["params"]):
        param.mul_(1.5)


@pytest.mark.parametrize("write", [reset_moments, scale_masters])
@pytest.mark.parametrize("config", [DEFAULTS, SMALL_SLABS])
def test_what_is_written_after_reload_states_is_kept_and_saved(write, config):
    # Slabs are on their way to the host then, with the bytes of before.
    saved, digests = with_a_write_between_steps(False, write)
    with bridge_fgo.install(config):
        mine_saved, mine = with_a_write_between_steps(True, write)
    assert mine == digests
    pairs = list(zip(leaves(saved), leaves(mine_saved), strict=True))
    assert pairs
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_wrapper_of_adams_step_is_called_once_a_step_with_every_parameter():
    def calls(offload):
        with CpuTraining(CpuOptions(offload=offload)) as training:
            adam = training.optimizer.chained_optimizers[0].optimizer
            step, seen = adam.step, []

            def wrapper(*args, **kwargs):
                seen.append([param.sum().item() for group in adam.param_groups for param in group["params"]])
                return step(*args, **kwargs)

            adam.step = wrapper
            for _ in range(3):
                training.step()
            return seen, training.digests()

    resident = calls(False)
    with bridge_fgo.install(SMALL_SLABS):
        assert calls(True) == resident
    assert len(resident[0]) == 3


def test_torchs_hook_for_kinetos_daemon_is_called_once_a_step_and_leaves_it_divided(monkeypatch):
    counted, updates = [], []
    monkeypatch.setattr(torch.profiler, "_optimizer_post_hook", lambda adam, *how: counted.append(type(adam)))
    update = InnerStep.update
    monkeypatch.setattr(InnerStep, "update", lambda inner, part: (updates.append(part), update(inner, part))[1])
    handle = register_optimizer_step_post_hook(torch.profiler._optimizer_post_hook)  # as with KINETO_USE_DAEMON=1
    try:
        expected = run(CpuOptions(experts=True), 4)
        of_resident = list(counted)
        counted.clear()
        with bridge_fgo.install(SMALL_SLABS):
            record = run(CpuOptions(experts=True, offload=True), 4)
    finally:
        handle.remove()
    assert record.digests == expected.digests
    assert counted == of_resident and len(counted) == 8  # of two optimizers
    assert len(updates) > 2 * 8


def test_an_optimizer_that_steps_outside_of_what_is_wired_is_an_error(bridge_train):
    # A callback installs, or a loop of one's own has taken `train_step` before.
    unwired = bridge_train.train_step
    with (
        CpuTraining(CpuOptions(offload=True)) as training,
        bridge_fgo.install(),
        mock.patch.object(bridge_train, "train_step", unwired),
    ):
        training.step()  # a warm-up may be
        named = r"offload_optimizer_states=True.*outside of Bridge's train_step.*unset the flag.*res\.training_step\(\)"
        with pytest.raises(RuntimeError, match=named):
            training.step()


def test_memory_that_offload_to_cpu_frees_is_given_to_the_device():
    with bridge_fgo.install(SMALL_SLABS), CpuTraining(CpuOptions(offload=True)) as training:
        for _ in range(3):
            training.step()
        bridge_fgo.reload_states()
        ledger, held = vars(training.optimizer)[SESSION].engine.schedule.ledger, []
        with mock.patch.object(upstream, "return_to_driver", lambda device: held.append(ledger.nbytes)):
            training.optimizer.offload_to_cpu()
        assert held == [0]
        training.optimizer.restore_from_cpu()
        assert ledger.nbytes > 0


def interrupt(*args):
    """What Ctrl-C comes in the midst of."""
    raise KeyboardInterrupt


def test_after_ctrl_c_in_a_move_a_new_training_goes_on_and_uninstalls_though_the_old_optimizer_lives(bridge_train):
    # In a notebook the traceback keeps it.
    original, expected = bridge_train.train_step, resident(3)
    bridge_fgo.install(SMALL_SLABS)
    with CpuTraining(CpuOptions(offload=True)) as training:
        training.step()
        old, model = training.optimizer, training.model
        slab = vars(old)[SESSION].engine.slabs[0]
        for action in ("_start_offload", "_release", "_give_up_offload", "_start_reload", "_wait_reload"):
            setattr(slab, action, interrupt)
        with pytest.raises(KeyboardInterrupt):
            training.step()
        with pytest.raises(RuntimeError, match="KeyboardInterrupt came"):
            bridge_fgo.reload_states()
        with pytest.raises(RuntimeError, match="cannot be trained any more"):
            training.step()
    with CpuTraining(CpuOptions(offload=True)) as training:
        for _ in range(3):
            training.step()
        bridge_fgo.reload_states()
        bridge_train.calc_params_l2_norm(training.model, training.cfg.model)
        assert training.digests() == expected.digests
    assert vars(old)[SESSION].is_lost and model
    bridge_fgo.uninstall()
    assert bridge_train.train_step is original


@pytest.mark.parametrize("installed_anew", [False, True])
def test_with_the_flag_unset_states_that_ctrl_c_has_caught_on_their_way_are_an_error_of_every_step(installed_anew):
    bridge_fgo.install(SMALL_SLABS)
    with CpuTraining(CpuOptions(offload=True)) as training:
        training.step()
        vars(training.optimizer)[SESSION].engine.slabs[0]._release = interrupt
        with pytest.raises(KeyboardInterrupt):
            training.step()
        if installed_anew:
            bridge_fgo.uninstall()
            bridge_fgo.install(SMALL_SLABS)
        training.cfg.optimizer.offload_optimizer_states = False
        for _ in range(2):
            with pytest.raises(RuntimeError, match="KeyboardInterrupt came"):
                training.step()
    bridge_fgo.uninstall()


def test_an_offloader_of_mcores_own_may_be_driven_by_hand(bridge_train):
    unwired = bridge_train.train_step
    with CpuTraining(CpuOptions(offload=True)) as training, bridge_fgo.install():
        training.optimizer.chained_optimizers[0]._state_offloader = object()
        with mock.patch.object(bridge_train, "train_step", unwired):
            for _ in range(3):
                training.step()
