"""What the GPU arm writes down of which step, without a GPU."""

import gc
import json
from types import SimpleNamespace

import pytest
import torch
from lengths import in_turn

import bridge_fgo
from bridge_fgo.figures import GRADIENT_FIGURES
from harness.arms import gpu
from harness.arms.runner import FIRST_COUNTED_STEP

pytestmark = pytest.mark.usefixtures("cpu_standins")

CONTEXT = SimpleNamespace(loss_dict={"lm loss": 1.0}, grad_norm=1.0, skipped_iter=False, model=None, optimizer=None)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--moments-dtype bf16", "--precision-aware"),
        ("--optimizer muon", "--no-distributed"),
        ("--fsdp optim --no-distributed", "--fsdp"),
        ("--own-loop --offload on", "--own-loop"),
        ("--layer-wise --offload on", "--layer-wise goes with"),
    ],
)
def test_options_that_do_not_go_together_end_the_arm_with_their_names(options, named, capsys):
    with pytest.raises(SystemExit):
        gpu.parse([*options.split(), "--events", "unused"])
    assert named in capsys.readouterr().err


class Stream:
    """A stream whose waits are written down, each a second of host time."""

    def __init__(self):
        self.waits, self.now = 0, 0.0

    def synchronize(self):
        self.waits += 1
        self.now += 1


@pytest.fixture
def stream(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr("bridge_fgo.memory.meters.time.perf_counter", lambda: stream.now)
    return stream


@pytest.fixture
def recorder(tmp_path, monkeypatch, stream):
    """A recorder of 5 steps, 2 that are not measured and 2 profiled ones."""
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 7)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    from harness.arms import gpu_recorder

    monkeypatch.setattr(gpu_recorder, "final_state", lambda *args: {"masters": {}, "moments": {}})
    monkeypatch.setattr(gpu_recorder, "joined_digests", lambda state: {})
    monkeypatch.setattr(bridge_fgo, "stats", lambda: None)
    options = ["--steps", "5", "--extra-steps", "2", "--trace", str(tmp_path / "trace.gz")]
    options = gpu.parse([*options, "--events", str(tmp_path / "events")])
    return gpu_recorder.ArmRecorder(options)


def train(recorder, stream, steps=7, in_step=lambda step: None, after_step=lambda step: None, context=CONTEXT):
    """Has a recorder see training, each step of a quarter of a second."""
    recorder.on_train_start(None)
    for step in range(1, steps + 1):
        recorder.on_train_step_start(context)  # waits for the stream: a second
        stream.now += 0.25
        in_step(step)
        recorder.on_train_step_end(context)
        after_step(step)
    recorder.on_train_end(context)


@pytest.fixture
def written(tmp_path):
    """Returns what returns the events of the steps, and the result."""

    def written():
        _, *steps, result = map(json.loads, (tmp_path / "events").read_text().splitlines())
        return steps, result

    return written


def test_what_comes_before_and_after_the_measured_steps_is_in_no_figure_and_the_last_are_profiled(
    recorder, written, stream, monkeypatch
):
    profiled, peak = [], {"now": 7}

    class Trace:
        def begin_step(self):
            profiled.append(recorder.step)

        end_step = end = lambda *_: None

    monkeypatch.setattr("harness.arms.gpu_recorder.StepTrace", Trace)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak["now"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.update(now=5))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 4)
    model = [object()]
    assert recorder.model_is_built(model) is model

    def in_step(step):
        peak["now"] = 9
        stats = SimpleNamespace(
            enqueue_seconds=step / 100, peak_forward_backward_bytes=1, peak_step_bytes=step,
            peak_reserved_bytes=1, engine="native", released_bytes=0, bytes_offloaded=0, pinned_bytes=0, pin_seconds=0,
            **dict.fromkeys(GRADIENT_FIGURES, 0),
        )  # fmt: skip
        monkeypatch.setattr(bridge_fgo, "stats", lambda: stats)

    train(recorder, stream, 9, in_step)
    assert profiled == [8, 9]
    steps, result = written()
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5]
    assert result["enqueue_seconds"] == [0.04, 0.05]
    assert len(result["step_seconds"]) == 5
    assert (result["first_step_peak_bytes"], result["peak_step_bytes"]) == (1, 5)
    assert [result[name] for name in ("peak_model_bytes", "model_bytes", "peak_setup_bytes")] == [7, 4, 5]


def test_no_collection_of_a_step_that_counts_looks_through_what_lived_before_it(recorder, stream):
    recorder._options.steps = FIRST_COUNTED_STEP
    gc.unfreeze()
    lives = [[]]
    looked_through = []

    def in_step(step):
        looked_through.append(any(found is lives for found in gc.get_objects()))

    train(recorder, stream, FIRST_COUNTED_STEP, in_step)
    assert looked_through == [True] * (FIRST_COUNTED_STEP - 1) + [False]
    assert gc.get_freeze_count() == 0


def test_a_save_is_in_the_seconds_of_its_step_and_its_writer_is_waited_for_in_none(
    recorder, written, stream, monkeypatch
):
    recorder._options.save, recorder._options.finish_saves = "a folder", True
    checkpoint = SimpleNamespace(save_interval=2)
    context = SimpleNamespace(**vars(CONTEXT), state=SimpleNamespace(cfg=SimpleNamespace(checkpoint=checkpoint)))
    writing = False

    def finish(state, config, blocking):
        nonlocal writing
        assert state is context.state and config is checkpoint and blocking
        if writing:
            stream.now += 100
            recorder.on_checkpoint_save(context)
        writing = False

    def save(step):
        nonlocal writing
        if checkpoint.save_interval and step % checkpoint.save_interval == 0:
            stream.now += 3
            writing = True

    monkeypatch.setattr("harness.arms.gpu_recorder.maybe_finalize_async_save", finish)
    train(recorder, stream, after_step=save, context=context)
    _, result = written()
    assert result["save_steps"] == [2, 4]
    assert result["step_seconds"] == [1.25, 4.25, 1.25, 4.25, 1.25]


def test_an_arm_in_turns_waits_before_each_at_rest_and_in_no_steps_seconds(recorder, written, stream, monkeypatch):
    done, begun = [], []

    class Taker:
        turn, left = None, 0

        def __init__(self, address, ranks):
            assert (address, ranks) == ("a socket", 2)

        def has_another_step(self):
            self.left -= 1
            return self.left >= 0

        def take(self):
            stream.now += 100
            done.append("wait")
            self.turn = 0 if self.turn is None else self.turn + 1
            self.left = 1 if self.turn < 2 else 100  # and the step that it is asked for

    recorder._options.turns = "a socket"
    monkeypatch.setattr("harness.arms.gpu_recorder.TurnTaker", Taker)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("give back"))
    monkeypatch.setattr(recorder._clock, "begin_turn", begun.append)
    train(recorder, stream)
    assert done == ["synchronize", "give back", "wait"] * 3 + ["synchronize"]
    assert begun == [1, 3, 5]
    steps, result = written()
    assert [step["turn"] for step in steps] == [0, 0, 1, 1, 2]
    assert result["step_seconds"] == [1.25] * 5


class At:
    """An event at a time in seconds."""

    def __init__(self, seconds):
        self.seconds = seconds

    def elapsed_time(self, other):
        return (other.seconds - self.seconds) * 1e3


@pytest.mark.parametrize(
    ("last", "counted", "turns"),
    [(9, (7, 8, 9), ()), (13, (9, 10, 12, 13), (1, 8, 11))],
    ids=["of 7 to 9, and not of those that are not measured", "of no first step of a turn"],
)
def test_phases_are_those_of_the_steps_that_count_and_not_of_the_wait_for_a_turn(last, counted, turns):
    from harness.arms.gpu_recorder import PhaseClock

    clock = PhaseClock(last)
    for step in range(1, 14):
        slow = 1 if step in counted else 50
        begin = 1000 * step + 100_000 * sum(step >= turn for turn in turns)
        clock._steps.append([(At(begin), At(begin + slow)), (At(begin + 3 * slow), At(begin + 5 * slow))])
        if step in turns:
            clock.begin_turn(step)
    assert clock.medians() == pytest.approx({"forward": 2, "first_forward": 1, "backward": 2, "rest": 995})


def test_a_forward_step_gets_one_cut_batch_a_call(monkeypatch):
    monkeypatch.setattr("megatron.core.num_microbatches_calculator.get_num_microbatches", lambda: 2)
    seen = []
    step = in_turn(lambda state, data, model: seen.append(next(data)["tokens"].shape[1]), (3, 5))
    data = iter({"tokens": torch.ones(1, 8)} for _ in range(9))
    for _ in range(8):
        step(SimpleNamespace(), data, None)
    assert seen == [3, 3, 5, 5, 3, 5, 5, 3] and len(list(data)) == 1
