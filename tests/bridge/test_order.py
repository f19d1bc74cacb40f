"""Call order inside Bridge's real train_step, by mocks."""

import functools
from types import SimpleNamespace
from unittest import mock

import pytest

import bridge_fgo
from bridge_fgo.bridge.session import active_session
from bridge_fgo.engines.native import NativeEngine

RESIDENT = ["zero_grad_buffer", "zero_grad", "forward_backward", "finalize", "step"]
ONE_PASS = ["offload", "zero_grad_buffer", "zero_grad", "release", "forward_backward", "reload", "finalize"]
WHOLE_STEP = [*ONE_PASS, "step", "settle"]
ORDERS = {
    "flag_off_makes_no_call": ({"flag": False}, RESIDENT),
    "an_mcore_without_the_field_counts_as_off": ({"flag": None}, RESIDENT),
    "flag_on": ({}, WHOLE_STEP),
    "mxfp8_copy_reads_the_masters_before_they_are_released": (
        {"mxfp8": True}, [*ONE_PASS[:3], "mxfp8_copy", *ONE_PASS[3:], "step", "settle"],
    ),
    "every_pass_of_the_rerun_loop_offloads_and_reloads": ({"passes": 3}, [*ONE_PASS * 3, "step", "settle"]),
    "two_model_chunks_are_one_offload": ({"chunks": 2}, ["offload", "zero_grad_buffer", *WHOLE_STEP[1:]]),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_each_step_makes_these_calls_and_leaves_what_bridge_bound(make_loop, installed, name):
    # A checkpoint's run config names the finalize that it finds between steps; ours could not be loaded again.
    how, order = ORDERS[name]
    loop = make_loop(**how)
    for _ in range(3):
        assert loop.step() == order
        assert loop.model_config.finalize_model_grads_func is loop.bound_finalize


def test_a_users_partial_around_finalize_gets_its_arguments_and_survives(loop):
    seen = []

    def finalize(model, num_tokens=None, *, pg_collection, extra):
        seen.append((model, num_tokens, pg_collection, extra))

    users = loop.model_config.finalize_model_grads_func = functools.partial(finalize, extra="bound")
    for _ in range(2):
        assert loop.step().count("reload") == 1
        assert loop.model_config.finalize_model_grads_func is users
    assert seen == [(loop.model, None, "groups", "bound")] * 2


def test_a_failed_step_shows_its_error_reloads_nothing_and_puts_the_bound_finalize_back(loop):
    loop.forward_backward = loop.fail
    with pytest.raises(MemoryError, match="activations"):
        loop.step()
    assert "settle" not in loop.events and active_session() is None
    assert loop.model_config.finalize_model_grads_func is loop.bound_finalize


def test_after_an_in_process_restart_the_hook_is_bound_again_and_only_the_new_optimizer_is_driven(loop, make_loop):
    loop.step()
    loop.model_config.finalize_model_grads_func = None  # what reset_for_restart does
    without = loop.step()
    assert "reload" not in without and without[-2:] == ["step", "settle"], "the step itself reloads"
    loop.model_config.finalize_model_grads_func = loop.bound_finalize  # what setup does
    assert loop.step() == WHOLE_STEP

    loop.step()
    new = make_loop()
    new.model_config, new.model = loop.model_config, loop.model
    new.model_config.finalize_model_grads_func = new.bound_finalize
    new.step()
    loop.events.clear()
    assert new.step().count("reload") == 1
    assert loop.events.count("reload") == 0


@pytest.mark.parametrize("gone", ["nothing is released", "the release seam", "a part"])
def test_flag_on_with_less_released_than_planned_is_an_error_not_a_silent_skip(make_loop, installed, monkeypatch, gone):
    loop = make_loop(freed={"nothing is released": 0, "a part": 60}.get(gone, 100))
    with monkeypatch.context() as patch:
        if gone == "the release seam":
            patch.setattr(loop.bridge_train, "_handle_mxfp8_param_buffer_copy", lambda **kwargs: None)
        if gone == "a part":  # before the first update not all that is planned exists
            loop.leaf.step = lambda: loop.session.updating() or (True, 1.0, None)
            loop.step()
        with pytest.raises(RuntimeError, match=r"released (0|60) bytes of the 100 planned.*silent no-op"):
            loop.step()


def nvrx(step):
    """NVRx hangs the function on an object and replaces the attribute by an instrumented one."""
    holder = SimpleNamespace(train_step=step)
    holder.train_step = functools.wraps(step)(lambda *args, **kwargs: step(*args, **kwargs))
    return holder.train_step


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


WRAPPERS = [nvrx, any_arguments, some_names, own_names_in_bridges_order, WithoutASignatureOfItsOwn, functools.partial]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("when", ["before install", "after install"])
def test_a_step_that_a_user_or_nvrx_has_wrapped_is_understood(monkeypatch, make_loop, bridge_train, wrap, when):
    loop = make_loop()
    if when == "before install":
        monkeypatch.setattr(bridge_train, "train_step", wrap(bridge_train.train_step))
    with bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native")):
        step = wrap(bridge_train.train_step) if when == "after install" else bridge_train.train_step
        assert loop.step(step) == WHOLE_STEP


@pytest.fixture
def stub_session(loop):
    """The session of a `loop` whose rank has stub optimizers only, with a schedule that only notes its calls."""
    loop.step()
    loop.session.engine = NativeEngine([], bridge_fgo.OffloadConfig(engine="native"), SimpleNamespace(works=True))
    loop.session.engine.schedule = mock.Mock(parts=[], is_planned=False)
    loop.session._is_proven = True  # that the mocked optimizer of the first step released something is no matter
    return loop.session


def test_a_rank_with_stub_optimizers_only_takes_part_in_what_ranks_agree_on(stub_session):
    # The schedule of such a rank has no parts, but the agreement on a budget is a collective of all ranks.
    with stub_session.training_step([], 1):
        stub_session.begin_pass()
        stub_session.release()
        stub_session.reload()
        stub_session.updated = True
    calls = [call[0] for call in stub_session.engine.schedule.mock_calls]
    assert calls == ["begin_pass", "release", "reload", "end_step"]


@pytest.mark.parametrize("skipped", [False, True])
def test_a_skipped_step_is_no_update_to_the_schedule(loop, stub_session, skipped):
    loop.leaf.step = lambda: (not skipped, 1.0, None)
    loop.step()
    stub_session.engine.schedule.end_step.assert_called_once_with(not skipped)


def test_another_sessions_optimizer_steps_by_its_own_engine_within_a_training_step(make_loop, installed):
    from bridge_fgo.bridge import state_wrappers

    second = make_loop()
    second.step()
    first = make_loop()  # whose engine is made from here on
    first.step()
    forward_backward = first.forward_backward

    def trains_the_second_too(**kwargs):
        state_wrappers.updates_states(lambda: second.events.append("stepped"), second.leaf, (), {})
        return forward_backward(**kwargs)

    first.forward_backward = trains_the_second_too
    second.events.clear()
    assert "stepping" not in first.step()
    assert second.events == ["stepping", "stepped"]
