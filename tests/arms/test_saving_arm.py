"""What the GPU arm's recorder does at background saves in Bridge's real `train()`, on the CPU."""

import json

import pytest
import torch
from both import training
from bridge_loop import train
from saving import background, configured

from harness.arms import gpu

pytestmark = pytest.mark.usefixtures("cpu_standins", "deadline")

STEPS, EXTRA, INTERVAL = 5, 2, 2


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Returns what trains with a recorder; it returns the result's event, and the saves under way as steps begin."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from harness.arms.gpu_recorder import ArmRecorder

    finalize = AsyncCallsQueue.maybe_finalize_async_calls

    def only_when_waited_for(queue, blocking=False, **how):
        """Has a writer be slower than a step."""
        return finalize(queue, blocking, **how) if blocking else []

    monkeypatch.setattr(AsyncCallsQueue, "maybe_finalize_async_calls", only_when_waited_for)
    for name in ("reset_peak_memory_stats", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, lambda: "none")
    for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 7)

    def record():
        saves = ["--save", str(tmp_path / "kept"), "--save-interval", str(INTERVAL), "--async-save", "--finish-saves"]
        options = ["--steps", str(STEPS), "--extra-steps", str(EXTRA), *saves, "--events", str(tmp_path / "events")]
        options = gpu.parse(options)
        under_way = []
        with training(True) as run:
            background(run, "fork", options.save)
            configured(run, checkpoint__save_interval=options.save_interval)
            queue = run.state.async_calls_queue
            recorder = ArmRecorder(options)
            train(
                run,
                STEPS + EXTRA,
                lambda number: under_way.append(queue.get_num_unfinalized_calls()),
                callback=recorder,
            )
        return json.loads((tmp_path / "events").read_text().splitlines()[-1]), under_way

    return record


def test_each_step_begins_when_the_checkpoint_of_the_last_is_complete(record, tmp_path):
    result, under_way = record()
    assert under_way == [0] * (STEPS + EXTRA)
    assert result["save_steps"] == [2, 4]
    assert len(result["step_seconds"]) == STEPS
    # After the steps that are measured there is none, neither at the interval nor at the end.
    assert sorted(path.name for path in (tmp_path / "kept").glob("iter_*")) == ["iter_0000002", "iter_0000004"]
