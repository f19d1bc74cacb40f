"""Call order inside Bridge's real train_step, by mocks."""

import functools
from types import SimpleNamespace
from unittest import mock

import pytest
from loop import Loop

import bridge_fgo
from bridge_fgo.bridge.session import SESSION, Session
from bridge_fgo.engines.engine import ATTACHED
from bridge_fgo.engines.native import NativeEngine

ONE_PASS = ["offload", "zero_grad_buffer", "zero_grad", "release", "forward_backward", "reload", "finalize"]


def test_flag_off_makes_no_call(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train, flag=False)
    assert loop.step() == ["zero_grad_buffer", "zero_grad", "forward_backward", "finalize", "step"]
    assert loop.model_config.finalize_model_grads_func is loop.bound_finalize


def test_a_step_that_was_taken_before_an_uninstall_makes_no_call(monkeypatch, bridge_train):
    # train() holds the wrapped step; the other bindings are gone, and the config's flag is set still.
    loop = Loop(monkeypatch, bridge_train)
    with bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native")):
        held = bridge_train.train_step
    monkeypatch.setattr(held, "__wrapped__", plain := mock.create_autospec(held.__wrapped__))
    assert loop.step(held) == [] and plain.call_count == 1
    assert SESSION not in vars(loop.optimizer)


def test_an_mcore_without_the_field_counts_as_off(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train, flag=None)
    assert "offload" not in loop.step()


def test_flag_on_offloads_zeroes_releases_runs_reloads_finalizes_steps(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train)
    assert loop.step() == [*ONE_PASS, "step", "settle"]


def test_mxfp8_copy_reads_the_masters_before_they_are_released(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train, mxfp8=True)
    events = loop.step()
    assert events.index("zero_grad") < events.index("mxfp8_copy") < events.index("release")


def test_every_pass_of_the_rerun_loop_offloads_and_reloads(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train, passes=3)
    assert loop.step() == [*ONE_PASS * 3, "step", "settle"]


def test_second_step_is_like_the_first(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train)
    assert loop.step() == loop.step()


def test_two_model_chunks_are_one_offload(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train, chunks=2)
    events = loop.step()
    assert events.count("zero_grad_buffer") == 2
    assert [events.count(verb) for verb in ("offload", "release", "reload", "finalize")] == [1, 1, 1, 1]


def test_bound_partial_gets_its_arguments(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train)
    seen = []

    def finalize(model, num_tokens=None, *, pg_collection, extra):
        seen.append((model, num_tokens, pg_collection, extra))

    loop.model_config.finalize_model_grads_func = functools.partial(finalize, extra="bound")
    loop.step()
    assert seen == [(loop.model, None, "groups", "bound")]


def test_between_steps_what_bridge_bound_is_there(monkeypatch, bridge_train, installed):
    # A checkpoint's run config names the function that it finds here; ours could not be loaded again.
    loop = Loop(monkeypatch, bridge_train)
    for _ in range(3):
        assert loop.step().count("reload") == 1
        assert loop.model_config.finalize_model_grads_func is loop.bound_finalize


def test_a_failed_step_puts_the_bound_finalize_back(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train)
    loop.forward_backward = lambda **kwargs: (_ for _ in ()).throw(MemoryError("activations"))
    with pytest.raises(MemoryError):
        loop.step()
    assert loop.model_config.finalize_model_grads_func is loop.bound_finalize


def test_a_users_wrapper_around_the_bound_finalize_survives(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train)
    users = functools.partial(loop.bound_finalize)
    loop.model_config.finalize_model_grads_func = users
    for _ in range(2):
        assert loop.step().count("reload") == 1
        assert loop.model_config.finalize_model_grads_func is users


def test_hook_is_bound_again_after_an_in_process_restart(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train)
    loop.step()
    loop.model_config.finalize_model_grads_func = None  # what reset_for_restart does
    assert "reload" not in loop.step()
    loop.model_config.finalize_model_grads_func = loop.bound_finalize  # what setup does
    assert loop.step() == [*ONE_PASS, "step", "settle"]


def test_a_restart_with_a_new_optimizer_drives_only_the_new_one(monkeypatch, bridge_train, installed):
    old = Loop(monkeypatch, bridge_train)
    old.step()
    new = Loop(monkeypatch, bridge_train)
    new.model_config = old.model_config
    new.model = old.model
    new.model_config.finalize_model_grads_func = new.bound_finalize
    new.step()
    old.events.clear()
    assert new.step().count("reload") == 1
    assert old.events.count("reload") == 0


def test_without_a_bound_finalize_the_step_itself_reloads(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train)
    loop.model_config.finalize_model_grads_func = None
    assert loop.step()[-2:] == ["step", "settle"]


def test_flag_on_with_nothing_released_is_an_error(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train, freed=0)
    with pytest.raises(RuntimeError, match="silent no-op"):
        loop.step()


def test_release_seam_gone_is_an_error_not_a_silent_skip(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train)
    monkeypatch.setattr(bridge_train, "_handle_mxfp8_param_buffer_copy", lambda **kwargs: None)
    with pytest.raises(RuntimeError, match="silent no-op"):
        loop.step()
    monkeypatch.undo()


def test_an_exception_in_forward_is_not_hidden_by_a_reload(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train)
    loop.forward_backward = lambda **kwargs: (_ for _ in ()).throw(MemoryError("activations"))
    with pytest.raises(MemoryError, match="activations"):
        loop.step()
    assert "settle" not in loop.events
    from bridge_fgo.bridge.session import active_session

    assert active_session() is None


def test_nvrx_wraps_the_installed_step(monkeypatch, bridge_train, installed):
    """NVRx hangs the function on an object and replaces the attribute by an instrumented one."""
    loop = Loop(monkeypatch, bridge_train)

    class TrainStepWrapper:
        def __init__(self, function):
            self.train_step = function

    holder = TrainStepWrapper(bridge_train.train_step)
    inner = holder.train_step
    holder.train_step = functools.wraps(inner)(lambda *args, **kwargs: inner(*args, **kwargs))
    assert loop.step(holder.train_step) == [*ONE_PASS, "step", "settle"]


def any_arguments(step):
    return lambda *args, **kwargs: step(*args, **kwargs)


def some_names(step):
    return lambda forward_step_func, data_iterator, *rest: step(forward_step_func, data_iterator, *rest)


def own_names_in_bridges_order(step):
    def timed(function, data, model, optimizer, scheduler, global_state, *rest):
        return step(function, data, model, optimizer, scheduler, global_state, *rest)

    return timed


class WithoutASignatureOfItsOwn:
    """An object that counts its calls."""

    def __init__(self, step):
        self.step, self.calls = step, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.step(*args, **kwargs)


@pytest.mark.parametrize(
    "wrap", [any_arguments, some_names, own_names_in_bridges_order, WithoutASignatureOfItsOwn, functools.partial]
)
@pytest.mark.parametrize("when", ["before install", "after install"])
def test_a_step_that_a_user_has_wrapped_without_functools_is_understood(monkeypatch, bridge_train, wrap, when):
    loop = Loop(monkeypatch, bridge_train)
    original = bridge_train.train_step
    if when == "before install":
        monkeypatch.setattr(bridge_train, "train_step", wrap(original))
    with bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native")):
        step = wrap(bridge_train.train_step) if when == "after install" else bridge_train.train_step
        assert loop.step(step) == [*ONE_PASS, "step", "settle"]


def native_engine(is_planned=False, **settings):
    """Return the engine of a rank without states, with a schedule that only notes its calls."""
    config = bridge_fgo.OffloadConfig(engine="native", **settings)
    engine = NativeEngine([], config, SimpleNamespace(works=True))
    engine.schedule = mock.Mock(
        parts=[], is_planned=is_planned, packing=mock.Mock(can_decide=False, checks_weights=False)
    )
    return engine


def test_a_rank_with_stub_optimizers_only_takes_part_in_what_ranks_agree_on(monkeypatch, bridge_train, installed):
    # The schedule of such a rank has no parts, but the agreement on a budget is a collective of all ranks.
    loop = Loop(monkeypatch, bridge_train)
    loop.step()
    session = vars(loop.optimizer)[SESSION]
    session.engine = native_engine()
    session._proof.is_given = True  # that the mocked optimizer of the first step released something is no matter here
    with session.training_step([], 1):
        session.begin_pass()
        session.release()
        session.reload()
        session.updated = True
    calls = [call[0] for call in session.engine.schedule.mock_calls]
    assert calls == ["begin_pass", "release", "reload", "end_step"]


def test_a_flag_that_is_unset_in_mid_run_closes_the_session(monkeypatch, bridge_train, installed):
    loop = Loop(monkeypatch, bridge_train)
    loop.step()
    session = vars(loop.optimizer)[SESSION]
    loop.optimizer_config.offload_optimizer_states = False
    assert "close" in loop.step()
    assert session.closed and SESSION not in vars(loop.optimizer) and ATTACHED not in vars(loop.leaf)


@pytest.mark.parametrize("skipped", [False, True])
def test_a_skipped_step_is_no_update_to_the_schedule(monkeypatch, bridge_train, installed, skipped):
    loop = Loop(monkeypatch, bridge_train)
    loop.step()
    session = vars(loop.optimizer)[SESSION]
    session.engine = native_engine()
    session._proof.is_given = True
    loop.leaf.step = lambda: (not skipped, 1.0, None)
    loop.step()
    session.engine.schedule.end_step.assert_called_once_with(not skipped)


@pytest.mark.parametrize(("peak", "planned", "told"), [(3, True, 1), (2, True, 0), (3, False, 0)])
def test_a_step_that_needed_more_than_the_budget_is_told_of_once(capsys, peak, planned, told):
    session = object.__new__(Session)
    session._over_budget, session.figures = False, SimpleNamespace(peak_allocated_bytes=peak * 2**30)
    engine = native_engine(planned, gpu_memory_budget_gib=2)
    for _ in range(2):
        session._watch_budget(engine.held_budget_bytes)
    said = capsys.readouterr().out
    assert said.count("allocated 3.00 GiB, more than OffloadConfig.gpu_memory_budget_gib=2:") == told


def test_another_sessions_optimizer_steps_by_its_own_engine_within_a_training_step(
    monkeypatch, bridge_train, installed
):
    from bridge_fgo.bridge import state_wrappers

    second = Loop(monkeypatch, bridge_train)
    second.step()
    first = Loop(monkeypatch, bridge_train)
    first.step()
    forward_backward = first.forward_backward

    def trains_the_second_too(**kwargs):
        state_wrappers.updates_states(lambda: second.events.append("stepped"), second.leaf, (), {})
        return forward_backward(**kwargs)

    first.forward_backward = trains_the_second_too
    second.events.clear()
    assert "stepping" not in first.step()
    assert second.events == ["stepping", "stepped"]
