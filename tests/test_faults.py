"""A signal or a failure at any point leaves the last checkpoint whole.

With BRIDGE_FGO_ALL_FAULTS=1 in the environment every point is tried in every way.
"""

import gc
import os
import signal
from pathlib import Path

import children
import fault_child
import pytest
from both import PACKED, WHOLE, bits, both, steps, training
from bridge_loop import train
from lanes import in_lanes
from saving import assert_same_shards, configured, load, newest, save, send_all_away

from bridge_fgo.memory import host_buffer

pytestmark = pytest.mark.usefixtures("cpu_standins")


def run(folder: Path, point: str | None = None, call: int = 1, how: str = "SIGKILL") -> int:
    """Run a child to its end; return its exit status, negative where a signal ended it."""
    child = children.start(fault_child.train, str(folder), point, call, how)
    return children.join(child, f"at {point}")


@pytest.fixture(scope="module")
def resident(cpu_standins, tmp_path_factory):
    """The folder of a resident run's checkpoint, and what a resident run that resumed from it was."""
    folder = tmp_path_factory.mktemp("resident")
    assert run(folder) == 0
    return folder, resumed(folder, False)


def resumed(folder, offload):
    with training(offload) as run:
        steps(run)  # mcore cannot load into torch's AdamW before its first step
        load(run, folder)
        return bits(run), steps(run, 2), bits(run)


ALL = bool(os.environ.get("BRIDGE_FGO_ALL_FAULTS"))
ONCE_A_STEP = ("the offload begins", "memory goes", "the reload begins")
SIGNALLED = ("the update of a part", "a state is handed to a checkpoint")
"""Points at which the fast lane sends SIGTERM; the slow one has the others."""
INTERRUPTED = ("the update of a part", "a copy out", "a state is handed to a checkpoint")
STATUS = {"SIGKILL": -signal.SIGKILL, "SIGINT": 1, "failed": 3}

FAULTS = [
    (point, call, how)
    for point in fault_child.POINTS
    for call in (1, 2)
    for how in STATUS
    if not (point in ONCE_A_STEP and call > 1) and (ALL or how != "SIGINT" or (point in INTERRUPTED and call > 1))
]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "call", "how"), FAULTS)
def test_the_last_checkpoint_stands(resident, tmp_path, point, call, how):
    assert run(tmp_path, point, call, how) == STATUS[how]
    assert newest(tmp_path).name == f"iter_{fault_child.SAVED_AFTER:07d}"
    assert_same_shards(newest(tmp_path), newest(resident[0]))


@pytest.mark.slow
@pytest.mark.parametrize("point", ["the update of a part", "a state is handed to a checkpoint"])
def test_a_killed_run_resumes_bitwise(resident, tmp_path, point):
    assert run(tmp_path, point, call=2) == -signal.SIGKILL
    assert resumed(tmp_path, True) == resident[1]


def fail(*args, **kwargs):
    raise fault_child.Injected


PARTS = {"the update of a part": 3, "a part's copy to the model": 2}
"""Points in a step, and at which of their calls it breaks."""


def break_step(run, place, patch):
    leaves = run.optimizer.chained_optimizers
    if place in PARTS:
        fault_child.break_at(place, PARTS[place], "failed", patch)
    elif place == "the second optimizer":
        patch(leaves[1], "step_with_ready_grads", fail)
    else:  # with a hook on the Adam the step is not divided
        leaves[0].optimizer.register_step_post_hook(lambda *args: None)
        patch(leaves[0], "_copy_main_params_to_model_params", fail)


@pytest.mark.parametrize("place", [*PARTS, "behind a hook", "the second optimizer"])
def test_a_torn_step_is_neither_saved_nor_gone_on_with(tmp_path, monkeypatch, place):
    # Some parameters have had an update more than others: a handler that saves must not make a checkpoint of it.
    with training(True, experts=place == "the second optimizer") as run, monkeypatch.context() as patch:
        run.step()
        save(run, tmp_path, "dp_reshardable")
        before = newest(tmp_path)
        break_step(run, place, patch.setattr)
        with pytest.raises(fault_child.Injected):
            run.step()
        patch.undo()
        with pytest.raises(RuntimeError, match=r"cannot be saved.*last checkpoint"):
            save(run, tmp_path, "dp_reshardable")
        with pytest.raises(RuntimeError, match="cannot be read"):
            run.optimizer.chained_optimizers[0].get_parameter_state_dp_zero()
        with pytest.raises(RuntimeError, match="cannot be updated"):
            run.step()
        assert newest(tmp_path) == before


def test_a_step_that_failed_before_or_after_every_update_may_be_saved_and_gone_on_with(tmp_path, monkeypatch):
    def failed(run):
        steps(run)
        with monkeypatch.context() as patch:
            patch.setattr(run.scheduler, "step", fail)
            with pytest.raises(fault_child.Injected):
                run.step()
        save(run, tmp_path / str(run.options.offload), "dp_reshardable")
        return steps(run)

    both(failed, experts=True)
    assert_same_shards(newest(tmp_path / "True"), newest(tmp_path / "False"))

    with training(True) as run, monkeypatch.context() as patch:
        run.step()
        fault_child.break_at("a forward", 1, "failed", patch.setattr)
        with pytest.raises(fault_child.Injected):
            run.step()
        patch.undo()
        save(run, tmp_path, "dp_reshardable")


@pytest.fixture(scope="module")
def fourth_step(cpu_standins, tmp_path_factory):
    """The checkpoint of a resident run after its fourth step."""
    folder = tmp_path_factory.mktemp("fourth")
    with training(False) as run:
        configured(run, checkpoint__save=str(folder))
        train(run, 4)
    return newest(folder)


@pytest.mark.parametrize("point", in_lanes(fault_child.POINTS, SIGNALLED))
def test_a_signal_ends_the_run_after_its_step_with_a_right_checkpoint(fourth_step, tmp_path, monkeypatch, point):
    # Bridge's handler of SIGTERM takes a note, and its loop saves and exits when the step is over.
    in_the_save = point == "a state is handed to a checkpoint"

    def send(number):
        if number == 4 - in_the_save:
            fault_child.break_at(point, 2 - (point in ONCE_A_STEP), "SIGTERM", monkeypatch.setattr)

    with training(True) as run:
        configured(run, checkpoint__save=str(tmp_path), train__exit_signal_handler=True)
        if in_the_save:
            configured(run, checkpoint__save_interval=3)
        with pytest.raises(SystemExit) as exit:
            train(run, 100, send)
    assert exit.value.code == 0
    assert_same_shards(newest(tmp_path), fourth_step)


def test_host_memory_that_cannot_be_had_is_an_error_before_training_that_leaves_nothing(monkeypatch):
    call = 5
    buffers, mapping, left = [], host_buffer.mmap.mmap, call

    def fail(*args):
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError("Cannot allocate memory")
        buffers.append(mapping(*args))
        return buffers[-1]

    monkeypatch.setattr(host_buffer.mmap, "mmap", fail)
    with pytest.raises(RuntimeError, match=r"could not map .* lower OffloadConfig\.fraction"), training(True):
        pass
    gc.collect()
    assert len(buffers) == call - 1
    for buffer in buffers:
        buffer.close()  # BufferError where a tensor still uses it


HANDED, WRITTEN = "a state is handed to a checkpoint", "an entry is written"
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("point", "call", "config", "options"),
    [
        *(pytest.param(HANDED, call, PACKED, {}, marks=marks) for call, marks in ((1, SLOW), (14, ()), (28, SLOW))),
        (WRITTEN, 40, WHOLE, fault_child.FSDP_OPTIONS),
    ],
)
def test_a_save_that_fails_leaves_the_last_one_and_training_goes_on(
    tmp_path, monkeypatch, point, call, config, options
):
    def failed(run):
        folder = tmp_path / str(run.options.offload)
        steps(run)
        save(run, folder, "dp_reshardable")
        seen = steps(run)
        send_all_away()
        if run.options.offload:
            with monkeypatch.context() as patch:
                fault_child.break_at(point, call, "failed", patch.setattr)
                with pytest.raises(BaseException, match=point):  # of PyTorch's writer no Exception
                    save(run, folder, "dp_reshardable")
            assert newest(folder).name == "iter_0000001"
        save(run, folder, "dp_reshardable")
        return seen, steps(run)

    both(failed, config, **options)
    for step in (1, 2):
        assert_same_shards(*(tmp_path / f"{offload}" / f"iter_{step:07d}" for offload in (True, False)))
