"""A run that is uninstalled or interrupted goes on bitwise, or is refused."""

import contextlib
import gc
import weakref
from unittest import mock

import pytest
import torch
from both import PACKED, SMALL, as_resident, bits, resident, session_of, steps, training
from cpu_training import CpuOptions, CpuTraining

import bridge_fgo
from bridge_fgo.bridge.session import SESSION
from bridge_fgo.engines.lease import LEASE
from bridge_fgo.memory.slab import Slab

pytestmark = pytest.mark.usefixtures("cpu_standins")

NO_MEMORY = mock.Mock(side_effect=torch.cuda.OutOfMemoryError("none left"))


@contextlib.contextmanager
def uninstalled(run):
    bridge_fgo.uninstall()
    yield


@contextlib.contextmanager
def uninstalled_and_the_wrapped_step_kept(run):
    from megatron.bridge.training import train as bridge_train

    held = bridge_train.train_step
    bridge_fgo.uninstall()
    with mock.patch.object(bridge_train, "train_step", held):
        yield


@contextlib.contextmanager
def the_flag_unset(run):
    run.cfg.optimizer.offload_optimizer_states = False
    yield


@contextlib.contextmanager
def installed_anew_and_the_flag_unset(run):
    bridge_fgo.uninstall()
    with bridge_fgo.install(PACKED), the_flag_unset(run):
        yield


@pytest.mark.parametrize(
    "event", [uninstalled, uninstalled_and_the_wrapped_step_kept, the_flag_unset, installed_anew_and_the_flag_unset]
)
def test_states_come_back_host_memory_goes_and_training_goes_on_bitwise_when(event):
    with as_resident(6) as run:
        steps(run, 3)
        session = session_of(run)
        held = [weakref.ref(slab.host) for slab in session.engine.slabs]
        held.append(weakref.ref(session.engine.schedule.transfers))  # on a GPU they hold every slab
        with event(run):
            run.train(3)
            assert min(run.live_bytes) > 0
            assert session.closed and LEASE not in vars(run.optimizer.chained_optimizers[0])
            assert event in (uninstalled, uninstalled_and_the_wrapped_step_kept) or SESSION not in vars(run.optimizer)
            gc.collect()
            assert len(held) > 1 and all(each() is None for each in held)


@pytest.mark.parametrize(("step", "options"), [(1, {}), (2, {"rerun_steps": frozenset({2})})], ids=["first", "rerun"])
def test_an_uninstall_in_a_forward_is_no_silent_no_op_and_bitwise_equal(step, options):
    # The rerun machine that Bridge's step has taken goes on telling of passes.
    with as_resident(step + 1, **options) as run:
        run.train(step - 1)
        forward = run._forward_step

        def uninstalls(*args, **kwargs):
            bridge_fgo.uninstall()
            return forward(*args, **kwargs)

        run._forward_step = uninstalls
        assert run.step().passes == step
        run.step()
        assert bridge_fgo.stats() is None


def test_stats_are_there_after_training_and_hold_no_memory():
    with bridge_fgo.install(PACKED):
        with CpuTraining(CpuOptions(offload=True)) as run:
            run.step()
            optimizer = weakref.ref(run.optimizer.chained_optimizers[0])
        del run
        gc.collect()
        assert optimizer() is None
        assert bridge_fgo.stats().steps == 1
    assert bridge_fgo.stats() is None


def test_an_uninstall_without_memory_for_the_states_leaves_all_as_it_was_and_may_be_called_again():
    # Without the bindings the next step or save would meet tensors with no memory behind them.
    with as_resident(6) as run:
        handle = bridge_fgo.install(PACKED)
        steps(run, 3)
        session = session_of(run)
        with mock.patch.object(Slab, "allocate", NO_MEMORY), pytest.raises(RuntimeError, match="none left"):
            bridge_fgo.uninstall()
        assert bridge_fgo.install() is handle
        assert not session.closed
        steps(run)
        handle.uninstall()
        assert session.closed
        run.train(2)


def test_weights_that_change_after_an_uninstall_that_failed_are_found_before_the_update():
    with training(True) as run:
        steps(run, 3)
        forward, weight, called = run._forward_step, next(run.model[0].parameters()), []

        def fails_to_uninstall(*args, **kwargs):
            if not called:
                with mock.patch.object(Slab, "allocate", NO_MEMORY), pytest.raises(torch.cuda.OutOfMemoryError):
                    bridge_fgo.uninstall()
                weight.data.mul_(2)
            called.append(True)
            return forward(*args, **kwargs)

        run._forward_step = fails_to_uninstall
        with pytest.raises(RuntimeError, match="weights of the model were changed"):
            run.step()
        assert len(called) > 1, "it came after forward, from the update"
        weight.data.div_(2)


def test_an_uninstall_is_not_held_up_by_a_training_that_is_over():
    def train_and_change_weights():
        with CpuTraining(CpuOptions(offload=True)) as run:
            run.train(2)
            session_of(run).engine.offload_now()
            next(run.model[0].parameters()).data.add_(1)
            run.optimizer.cycle = run

    with bridge_fgo.install(PACKED):
        train_and_change_weights()


# An optimizer that is read or driven otherwise.


def test_the_norm_of_one_model_leaves_the_masters_of_another_where_they_are():
    from bridge_fgo.bridge import state_wrappers

    with training(True) as run:
        steps(run, 2)
        session = session_of(run)
        session.engine.offload_now()
        released = [slab.state for slab in session.engine.slabs]
        other = [torch.nn.Linear(2, 2)]
        assert session.trains(run.model) and not session.trains(other)
        another = mock.Mock(**{"trains.side_effect": lambda chunks: chunks is other})
        with mock.patch.object(state_wrappers, "all_sessions", lambda: [session, another]):
            state_wrappers.reads_all_masters(lambda model: None, None, (other,), {})
        another.engine.require_readable.assert_called_once_with(masters_only=True)
        assert [slab.state for slab in session.engine.slabs] == released


def test_an_optimizer_that_steps_outside_of_what_is_wired_is_an_error(bridge_train):
    # A callback installs, or a loop of one's own has taken `train_step` before.
    unwired = bridge_train.train_step
    with (
        CpuTraining(CpuOptions(offload=True)) as run,
        bridge_fgo.install(),
        mock.patch.object(bridge_train, "train_step", unwired),
    ):
        run.step()  # a warm-up may be
        named = r"offload_optimizer_states=True.*outside of Bridge's train_step.*unset the flag.*res\.training_step\(\)"
        with pytest.raises(RuntimeError, match=named):
            run.step()


def test_an_offloader_of_mcores_own_may_be_driven_by_hand(bridge_train):
    unwired = bridge_train.train_step
    with CpuTraining(CpuOptions(offload=True)) as run, bridge_fgo.install():
        run.optimizer.chained_optimizers[0]._state_offloader = object()
        with mock.patch.object(bridge_train, "train_step", unwired):
            run.train(3)


# Ctrl-C.


def interrupt(*args):
    """What Ctrl-C comes in the midst of."""
    raise KeyboardInterrupt


def test_after_ctrl_c_in_a_move_a_new_training_goes_on_though_the_old_optimizer_lives(bridge_train):
    # In a notebook the traceback keeps it.
    original, (_, end) = bridge_train.train_step, resident(3)
    bridge_fgo.install(PACKED)
    with CpuTraining(CpuOptions(offload=True)) as run:
        run.step()
        old, model = run.optimizer, run.model
        slab = vars(old)[SESSION].engine.slabs[0]
        for action in ("_start_offload", "_release", "_give_up_offload", "_start_reload", "_wait_reload"):
            setattr(slab, action, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.step()
        with pytest.raises(RuntimeError, match="KeyboardInterrupt came"):
            bridge_fgo.reload_states()
        with pytest.raises(RuntimeError, match="cannot be trained any more"):
            run.step()
    with CpuTraining(CpuOptions(offload=True, **SMALL)) as run:
        run.train(3)
        bridge_fgo.reload_states()
        bridge_train.calc_params_l2_norm(run.model, run.cfg.model)
        assert bits(run) == end
    assert vars(old)[SESSION].is_lost and model
    bridge_fgo.uninstall()
    assert bridge_train.train_step is original


@pytest.mark.parametrize("installed_anew", [False, True])
def test_with_the_flag_unset_states_that_ctrl_c_has_caught_on_their_way_are_an_error_of_every_step(installed_anew):
    bridge_fgo.install(PACKED)
    with CpuTraining(CpuOptions(offload=True)) as run:
        run.step()
        session_of(run).engine.slabs[0]._release = interrupt
        with pytest.raises(KeyboardInterrupt):
            run.step()
        if installed_anew:
            bridge_fgo.uninstall()
            bridge_fgo.install(PACKED)
        run.cfg.optimizer.offload_optimizer_states = False
        for _ in range(2):
            with pytest.raises(RuntimeError, match="KeyboardInterrupt came"):
                run.step()
    bridge_fgo.uninstall()
