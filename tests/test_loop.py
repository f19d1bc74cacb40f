"""Bridge's `train()` saves, skips, evaluates and ends bitwise as resident."""

import dataclasses
import functools
import gc
import os
import signal

import async_worker
import pytest
import torch
from both import bits, both, steps, training
from bridge_loop import train
from cpu_model import microbatches
from lanes import in_lanes
from saving import assert_same_shards, background, configured, load, newest

pytestmark = pytest.mark.usefixtures("cpu_standins")


def a_signal_in_the_second_step(number):
    if number == 2:
        os.kill(os.getpid(), signal.SIGTERM)


def grow_the_batch(run):
    """Have the batch be one microbatch at first, and two from the fifth sample on."""
    from megatron.core import num_microbatches_calculator as calculator

    size = run.cfg.train.micro_batch_size
    calculator.reconfigure_num_microbatches_calculator(
        0, None, 2 * size, size, 1, step_batch_size_schedule=f"0:{size} {2 * size}:{2 * size}"
    )


SAVES = {
    "at an interval": ({"checkpoint__save_interval": 2}, [2, 4]),
    "at the end": ({}, [4]),
    "at exit_interval": ({"train__exit_interval": 3}, [3]),
    "at exit_duration": ({"train__exit_duration_in_mins": 1e-9}, [1]),
    "on a signal": ({"train__exit_signal_handler": True}, [2]),
    "at the rerun machine's exit": ({}, [2]),
    "at a batch-size ramp-up": ({}, [2, 4]),
    "non-persistent": (
        {"checkpoint__non_persistent_save_interval": 3, "checkpoint__non_persistent_ckpt_type": "global"}, [4],
    ),
}  # fmt: skip
"""Settings, and the steps after which there are checkpoints."""
FAST = [
    *(("foreground", when) for when in ("at an interval", "at the rerun machine's exit")),
    *(("fork", when) for when in ("on a signal", "non-persistent")),
]
"""Saves that the fast lane has."""
EXIT_STATUS = {"at exit_interval": 0, "at exit_duration": 0, "on a signal": 0, "at the rerun machine's exit": 16}
"""The last is mcore's `EXIT_CODE_RESUME_TO_DISAMBIGUATE`."""


def run_and_save(folder, when, kind, offload, writer="foreground"):
    """Train four steps, or until Bridge ends the process, with checkpoints as SAVES says; return the exit status."""
    options = {"checkpoint_exit_step": 3} if when == "at the rerun machine's exit" else {}
    with training(offload, **options) as run:
        configured(run, checkpoint__save=str(folder), **SAVES[when][0])
        run.cfg.checkpoint.dist_ckpt_optim_fully_reshardable = kind == "fully_reshardable"
        if writer != "foreground":
            background(run, writer, folder)
        if when == "at a batch-size ramp-up":
            grow_the_batch(run)
        try:
            train(run, 4, a_signal_in_the_second_step if when == "on a signal" else lambda number: None)
        except SystemExit as exit:
            return exit.code


@pytest.fixture(scope="module")
def resident(cpu_standins, tmp_path_factory):
    """Return the folder of what a resident run saves, by SAVES' key and the format.

    In the foreground: a background writer of a CPU run shares the memory of resident states, which the next step
    changes; on a GPU they are copied first.
    """

    @functools.cache
    def folder(when, kind):
        folder = tmp_path_factory.mktemp("resident")
        assert run_and_save(folder, when, kind, offload=False) == EXIT_STATUS.get(when)
        return folder

    return folder


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize(
    ("writer", "when"), in_lanes([(w, when) for w in ("foreground", "fork", "mcore") for when in SAVES], FAST)
)
def test_what_the_loop_saves_has_the_bytes_of_a_resident_run(resident, tmp_path, monkeypatch, when, writer):
    kind = "fully_reshardable" if writer == "foreground" else "dp_reshardable"  # which hands out the states themselves
    workers = async_worker.have_bridge_use("mcore", monkeypatch.setattr, quickly=True) if writer == "mcore" else []
    assert run_and_save(tmp_path, when, kind, True, writer) == EXIT_STATUS.get(when)
    assert [worker.exitcode for worker in workers] == [0] * (writer == "mcore"), "the worker has ended, by itself"
    names = [f"iter_{step:07d}" for step in SAVES[when][1]]
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == names
    assert newest(tmp_path).name == names[-1]
    assert_same_shards(tmp_path, resident(when, kind))
    if when == "non-persistent":
        (extra,) = tmp_path.glob("*/iter_*")
        assert extra.name == "iter_0000003" and list(extra.glob("*.distcp"))
    assert all(path.with_name(".metadata").exists() for path in tmp_path.rglob("*.distcp")), "finalized"


@pytest.fixture
def local_checkpoints():
    """Skip the test where mcore's local checkpoints cannot be had."""
    pytest.importorskip(
        "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager",
        reason="needs nvidia-resiliency-ext",
        exc_type=ImportError,
    )


def save_locally(run, folder, background):
    """Have the loop save to local storage after the second step."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    local = {"non_persistent_save_interval": 2, "non_persistent_ckpt_type": "local", "save_interval": 100}
    configured(run, **{f"checkpoint__{name}": value for name, value in local.items()})
    configured(run, checkpoint__save=str(folder), checkpoint__non_persistent_local_ckpt_dir=str(folder / "local"))
    if background:
        configured(run, checkpoint__async_save=True)
        run.state._async_calls_queue = AsyncCallsQueue(persistent=False)


@pytest.mark.usefixtures("local_checkpoints", "deadline")
@pytest.mark.parametrize("background", [False, True], ids=["", "in the background"])
def test_local_checkpoints_have_the_bytes_of_a_resident_run_and_resume_bitwise(tmp_path, background):
    from megatron.bridge.training.checkpointing import init_checkpointing_context

    def saved(run):
        save_locally(run, tmp_path / str(run.options.offload), background)
        train(run, 2)
        return bits(run)

    def resumed(run):
        steps(run)  # mcore cannot load into torch's AdamW before its first step
        save_locally(run, tmp_path / "True", background=False)
        load(run, tmp_path / "not there", init_checkpointing_context(run.cfg.checkpoint))
        return bits(run), steps(run, 2)

    end, _ = both(saved)
    ours, resident = (tmp_path / str(offload) / "local/0/iter_0000002_0_local.pt" for offload in (True, False))
    assert ours.read_bytes() == resident.read_bytes()
    assert both(resumed)[0][0] == end


EVALUATES = {"validation__eval_interval": 2, "validation__eval_iters": 2, "validation__eval_global_batch_size": 4}
HASHES = {"train__check_weight_hash_across_dp_replicas_interval": 2}
NORM = {"logger__log_params_norm": True, "logger__log_interval": 1}
LOOPS = {
    "iterations to skip": ({"train__iterations_to_skip": [2, 4]}, {}),
    "manual GC": ({"train__manual_gc": True, "train__manual_gc_interval": 2}, {}),
    "weight hashes across DP replicas": (HASHES, {}),
    "evaluations": (EVALUATES, {}),
    "evaluations after the norm of the parameters": ({**EVALUATES, **NORM}, {}),
    "overlapped parameter gathering, evaluations, hashes and the norm": (
        {**EVALUATES, **NORM, **HASHES}, {"overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
}  # fmt: skip
"""Settings, and options of the training."""


LONGEST = "overlapped parameter gathering, evaluations, hashes and the norm"


@pytest.mark.parametrize("what", in_lanes(LOOPS, ("iterations to skip", LONGEST)))
def test_the_loop_is_bitwise_equal_with(what):
    settings, options = LOOPS[what]

    def trained(run):
        configured(run, validation__eval_micro_batch_size=2, **settings)
        run.state.train_state.do_valid = True
        seen = train(run, 6, valid=valid_batches(run))
        assert (max(seen.held) == 0) == (min(seen.held) == 0) == run.options.offload, "off in every forward, or in none"
        if "evaluations" in what and run.options.offload:
            assert seen.held_in_evaluations == [0, 0, 0], "an evaluation holds no more than training"
        if "norm" in what:
            assert len(seen.params_norms) == 6
        if "skip" in what:
            assert len(seen.losses) == 4
        return seen.numbers

    both(trained, **options)


def valid_batches(run):
    """Microbatches to evaluate on, others than those of the training."""
    from megatron.core.rerun_state_machine import RerunDataIterator

    return RerunDataIterator(microbatches(dataclasses.replace(run.options, seed=run.options.seed + 1)))


def garbage_of_three_steps(run):
    """Return what three steps leave that only the garbage collector can free."""
    run.train(2)
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        run.train(3)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


def test_with_manual_gc_a_step_leaves_nothing_of_ours_for_the_collector():
    # With manual_gc nothing is collected for thousands of steps; a slab or a graph in a cycle would stay as long.
    left = {}
    for offload in (False, True):
        with training(offload) as run:
            garbage = garbage_of_three_steps(run)
            assert not [thing for thing in garbage if type(thing).__module__.startswith("bridge_fgo")]
            left[offload] = sum(isinstance(thing, torch.Tensor) for thing in garbage)
    assert left[True] == left[False]
