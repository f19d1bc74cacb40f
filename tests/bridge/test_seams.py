"""The other bindings of the table: compiled helpers, MIMO's step, QK-clip, building the optimizer; what is reported."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from test_order import WHOLE_STEP

import bridge_fgo


@pytest.mark.parametrize("helper", ["built", None])
def test_bridge_goes_on_when_make_fails_if_the_helper_is_built_and_exits_as_ever_if_not(monkeypatch, installed, helper):
    from megatron.bridge.training import initialize

    build = mock.Mock(side_effect=["built", SystemExit(1)])
    monkeypatch.setattr(initialize.compile_helpers, "__wrapped__", build)
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", helper and mock.Mock())
    assert initialize.compile_helpers() == "built", "a build that works is left alone"
    if helper is None:
        with pytest.raises(SystemExit):
            initialize.compile_helpers()
    else:
        initialize.compile_helpers()


@pytest.fixture
def mimo_step(monkeypatch):
    """Return what runs Bridge's real MIMO step on a loop's mocks, and returns the order of calls."""
    import megatron.bridge.training.train_megatron_mimo as mimo
    from megatron.core.models.mimo.optimizer import MimoOptimizer

    def run(loop):
        optimizer = object.__new__(MimoOptimizer)
        vars(optimizer).update(
            module_infos={}, config=loop.optimizer_config, _active_optimizers=[loop.optimizer], is_stub_optimizer=False,
            step=loop.leaf.step,
        )  # fmt: skip
        module = mock.Mock()
        module.zero_grad_buffer.side_effect = lambda: loop.events.append("zero_grad_buffer")
        schedule = "forward_backward_pipelining_without_interleaving"
        monkeypatch.setattr(mimo, schedule, lambda **how: loop.forward_backward(model=how["model"]))
        monkeypatch.setattr("megatron.core.utils.get_model_config", lambda model: loop.model_config)
        loop.events.clear()
        mimo.train_step_megatron_mimo(
            forward_step_func=mock.Mock(), data_iterator=None, model=mock.Mock(config=loop.model_config, modules=list),
            optimizer=optimizer, schedulers={}, global_state=loop.state, multimodule_communicator=None,
            multimodule_pg_collection=None, infra=SimpleNamespace(pg_collections=None),
            module_to_grid_tuple=[(module, "grid")], num_microbatches=1, seq_length=8, micro_batch_size=1,
        )  # fmt: skip
        return list(loop.events)

    parallel = "megatron.bridge.training.megatron_mimo_parallel_utils.is_current_rank_in_grid"
    monkeypatch.setattr(parallel, lambda grid: True)
    monkeypatch.setattr(mimo, "unwrap_megatron_mimo_model", lambda model: SimpleNamespace(role=None))
    monkeypatch.setattr(mimo.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(mimo.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    monkeypatch.setattr("megatron.core.num_microbatches_calculator.get_num_microbatches", lambda: 1)
    return run


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["", "wrapped without functools"])
def test_a_mimo_step_makes_a_steps_calls_and_none_with_the_flag_off(
    monkeypatch, make_loop, mimo_step, flag, is_wrapped
):
    import megatron.bridge.training.train_megatron_mimo as mimo

    original = mimo.train_step_megatron_mimo
    if is_wrapped:
        monkeypatch.setattr(mimo, "train_step_megatron_mimo", lambda **kwargs: original(**kwargs))
    loop, ours = make_loop(flag=flag), ("offload", "release", "reload", "settle")
    with bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native")):
        events = mimo_step(loop)
    assert events == [e for e in WHOLE_STEP if e != "zero_grad" and (flag or e not in ours)]
    assert loop.model_config.finalize_model_grads_func is loop.bound_finalize


@pytest.mark.parametrize("only_logged", [None, True, False], ids=["as Bridge calls it", "only logged", "clipped"])
def test_qk_clip_gets_writable_masters_after_a_skipped_step_too_and_none_where_it_only_logs(
    monkeypatch, loop, only_logged
):
    loop.cfg.model.qk_clip = True
    loop.leaf.step = lambda: loop.events.append("skipped") or (False, 1.0, None)
    clip = loop.bridge_train.clip_qk
    monkeypatch.setattr(clip, "__wrapped__", lambda model, log_max_only=False: loop.events.append("clip_qk"))
    if only_logged is not None:  # as Bridge's main has it
        newer = {"log_max_only": only_logged}
        monkeypatch.setattr(loop.bridge_train, "clip_qk", lambda model, **how: clip(model, **newer))
    writable = [] if only_logged else ["writable"]
    assert loop.step()[-3 - len(writable) :] == ["skipped", *writable, "clip_qk", "settle"]
    monkeypatch.undo()


def test_paged_stash_retry_is_a_pass_of_its_own(monkeypatch, loop):
    from megatron.core.transformer.moe.paged_stash import PagedStashRunner

    runner = object.__new__(PagedStashRunner)
    wrapper = vars(PagedStashRunner)["prepare_for_rerun"]
    monkeypatch.setattr(wrapper, "__wrapped__", lambda self, is_training=True: loop.events.append("prepare"))
    first_attempt = loop.forward_backward

    def with_retry(**kwargs):
        first_attempt(**kwargs)
        runner.prepare_for_rerun()
        return first_attempt(**kwargs)

    loop.forward_backward = with_retry
    attempt = ["release", "forward_backward", "reload", "finalize"]
    assert loop.step() == [
        "offload", "zero_grad_buffer", "zero_grad", *attempt, "offload", "prepare", *attempt, "step", "settle",
    ]  # fmt: skip
    runner.prepare_for_rerun()  # evaluation retries too, outside of any training step
    assert loop.events[-1] == "prepare"


# What is reported.


@pytest.mark.parametrize("has_tensorboard", [True, False])
def test_figures_go_to_the_loggers_that_are_there_at_bridges_interval(loop, tmp_path, has_tensorboard):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    loop.cfg.logger.tensorboard_log_interval = 2
    board = loop.state.tensorboard_logger = SummaryWriter(str(tmp_path)) if has_tensorboard else None
    wandb = loop.state.wandb_logger = mock.Mock()
    for step in range(4):
        loop.state.train_state.step = step
        loop.step()
    if board is not None:
        board.close()
        events = EventAccumulator(str(tmp_path)).Reload()
        released = [(event.step, event.value) for event in events.Scalars("bridge_fgo/released_bytes")]
        assert released == [(2, 100.0), (4, 100.0)]
    assert [call.args[1] for call in wandb.log.call_args_list] == [2, 4]
    assert wandb.log.call_args.args[0]["bridge_fgo/passes"] == 1


@pytest.mark.parametrize(
    "logger", [None, SimpleNamespace(), *(SimpleNamespace(tensorboard_log_interval=n) for n in (None, 0))]
)
def test_without_an_interval_no_figures_are_logged(loop, logger):
    loop.cfg.logger = logger
    board = loop.state.tensorboard_logger = loop.state.wandb_logger = mock.Mock()
    loop.step()
    assert board.mock_calls == []


def test_bridges_memory_report_keeps_the_peak_of_the_run(monkeypatch, installed):
    from megatron.bridge.training.utils import train_utils

    from bridge_fgo.bridge import train_step

    session = SimpleNamespace(meter=SimpleNamespace(run_peaks={"allocated_bytes.all.peak": 9_000_000_000}))
    monkeypatch.setattr(train_step, "all_sessions", lambda: [session])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"allocated_bytes.all.peak": 1_000_000_000})
    before = torch.cuda.memory_stats
    report = train_utils.report_memory({"allocated_bytes.all.peak": "mem-max-allocated-bytes"})
    assert report == {"mem-max-allocated-gigabytes": 9.0}
    assert torch.cuda.memory_stats is before


def test_the_start_lines_say_once_what_will_happen_and_what_mcores_activation_offload_gets(loop, capsys):
    loop.model_config.fine_grained_activation_offloading = True
    for _ in range(2):
        loop.step()
    said = capsys.readouterr().out
    assert said.count("bridge_fgo: optimizer-state offload on") == 1
    assert "engine native" in said and "pinned" in said and "stays resident" in said
    assert said.count("model.fine_grained_activation_offloading=True: the waits that mcore's copies") == 1


def test_stats_is_a_snapshot_of_the_newest_step(loop):
    assert bridge_fgo.stats() is None
    loop.step()
    first = bridge_fgo.stats()
    loop.step()
    assert (first.steps, bridge_fgo.stats().steps) == (1, 2)
    assert bridge_fgo.stats().released_bytes == 100
