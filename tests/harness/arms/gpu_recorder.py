"""Measures an arm's run and writes its events, as a callback of Bridge's; times the phases of a step, and traces it."""

from __future__ import annotations

import argparse
import functools
import gc
import gzip
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, override

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.checkpointing import maybe_finalize_async_save
from megatron.core.num_microbatches_calculator import get_num_microbatches

import bridge_fgo
from bridge_fgo.engines.ranks import gather
from bridge_fgo.figures import GRADIENT_FIGURES, Stats
from bridge_fgo.memory.meters import is_graphs, segments
from harness.arms.final_state import (
    digests_by_parameter,
    digests_of_ranks,
    final_state,
    joined_digests,
    live_state_bytes,
)
from harness.arms.runner import FIRST_COUNTED_STEP, EventWriter
from harness.arms.turns import TurnTaker

FIRST_MEASURED_STEP = 4  # from this step on moments exist and buffers are warm: peaks are those of all steps that come
SERIES = ("step_seconds", "enqueue_seconds", "save_steps")
COPIES = {"Memcpy DtoH": "d2h", "Memcpy HtoD": "h2d"}
STEP = "bridge_fgo step"
MEMORY_ENTRIES = 2_000_000
PHASES = ("forward_backward", "step")  # what the package tells the peaks of apart


class PhaseClock:
    """Times phases by CUDA events around the calls of the forward step, up to step `last`; no pipeline parallelism.

    What lies between the end of a forward and the begin of the next one is a backward. After the last forward of a step
    there are its backward, the gradients' reduction and the optimizer step.
    """

    def __init__(self, last: int) -> None:
        self.last = last
        self._steps: list[list[tuple[Any, Any]]] = []
        self._turns: list[int] = []

    def begin_turn(self, step: int) -> None:
        """Note that `step`, counted from 1, is the first of a turn: it begins cold, and after a wait for others."""
        self._turns.append(step)

    def timed(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward step with events around it."""

        @functools.wraps(forward_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            if not self._steps or len(self._steps[-1]) == get_num_microbatches():
                self._steps.append([])
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = forward_step(*args, **kwargs)
            end.record()
            self._steps[-1].append((start, end))
            return result

        return step

    def medians(self) -> dict[str, float | None]:
        """Return the medians over all whole steps in seconds; None where there is nothing to tell a phase by.

        `rest` is the time from the end of a step's last forward to the first forward of the next step. Of `forward` all
        but the step's first count, which is `first_forward`, and of `backward` all but the last: those may wait for
        copies. The first turn does not count, nor the first step of a turn, nor the wait for it.
        """
        begin = self._turns[1] if len(self._turns) > 1 else FIRST_COUNTED_STEP
        last = min(self.last, len(self._steps))
        steps = {n: self._steps[n - 1] for n in range(begin, last + 1) if n not in self._turns}
        groups = {
            "forward": [_seconds(*pair) for step in steps.values() for pair in (step[1:] or step)],
            "first_forward": [_seconds(*step[0]) for step in steps.values()],
            "backward": [_seconds(a[1], b[0]) for step in steps.values() for a, b in itertools.pairwise(step)],
            "rest": [_seconds(step[-1][1], steps[n + 1][0][0]) for n, step in steps.items() if n + 1 in steps],
        }
        return {name: statistics.median(values) if values else None for name, values in groups.items()}


def _seconds(start: Any, end: Any) -> float:
    return start.elapsed_time(end) / 1e3


class StepTrace:
    """Profiles two steps by PyTorch's profiler and memory history, and keeps the second.

    Starting the profiler waits for all copies, so the first step has none from the step before it.
    """

    def __init__(self) -> None:
        self._profiler: Any = None
        self._annotation: Any = None
        self._allocated = 0

    def begin_step(self) -> None:
        """Begin a step: the first starts the profiler, the second is the one to keep."""
        if self._profiler is None:
            torch.cuda.synchronize()
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
            return
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES, stacks="python", context=None)
        self._allocated = torch.cuda.memory_allocated()
        self._annotation = torch.profiler.record_function(STEP)
        self._annotation.__enter__()

    def end_step(self) -> None:
        """End a step, once the compute stream has run dry; copies may go on."""
        if self._annotation is not None:
            torch.cuda.current_stream().synchronize()
            self._annotation.__exit__(None, None, None)

    def end(self, path: Path | None) -> None:
        """Write what happened in the step that was kept as gzipped JSON; times in seconds from its begin.

        step: (begin, end); gpu: (kind, start, duration, bytes) with kind "kernel", "d2h" or "h2d"; memory: (time,
        allocated bytes). A `path` of None only stops the profiler.
        """
        torch.cuda.synchronize()
        self._profiler.stop()
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        if path is None:
            return
        raw = path.with_suffix(".chrome.json")
        self._profiler.export_chrome_trace(str(raw))
        events = json.loads(raw.read_text())["traceEvents"]
        raw.unlink()
        step = next(e for e in events if e.get("name") == STEP and e.get("cat") == "user_annotation")
        zero = step["ts"]
        device_traces: Any = snapshot.get("device_traces", [])
        trace = {
            "step": (0.0, step["dur"] / 1e6),
            "gpu": sorted(event for event in _gpu_events(events, zero) if event[1] + event[2] > 0),
            "memory": _memory(device_traces[torch.cuda.current_device()], self._allocated),
        }
        with gzip.open(path, "wt") as file:
            json.dump(trace, file)


def _gpu_events(events: Sequence[dict[str, Any]], zero: float) -> Iterator[tuple[str, float, float, int]]:
    """Yield (kind, start, duration, bytes) of what the GPU did; copies on the GPU, and memsets, are kernels."""
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy"):
            kind = next((kind for name, kind in COPIES.items() if event["name"].startswith(name)), "kernel")
            yield kind, (event["ts"] - zero) / 1e6, event["dur"] / 1e6, int(event.get("args", {}).get("bytes", 0))


def _memory(trace: Sequence[Any], allocated: int) -> list[tuple[float, int]]:
    points: list[tuple[float, int]] = []
    start = trace[0]["time_us"] if trace else 0
    for entry in trace:
        # A block is given back when its free is requested; with a use on another stream it is completed later.
        change = {"alloc": entry["size"], "free_requested": -entry["size"]}.get(entry["action"])
        if change is not None:
            allocated += change
            points.append(((entry["time_us"] - start) / 1e6, allocated))
    return points


def figure(stats: Stats | None, name: str) -> Any:
    """Return a figure of the newest step by its name; 0 where it has none, or nothing is offloaded."""
    return 0 if stats is None else getattr(stats, name) or 0


class ArmRecorder(Callback):
    """Measures the run and, on rank 0, writes its events."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._clock = PhaseClock(options.steps)
        self.writer: EventWriter | None = None
        self.step = 0
        self.started = 0.0
        self.newest: dict[str, Any] = {}  # the event of the step that is not over yet
        self.peaks: dict[str, int] = {}
        self.figures: dict[str, Any] = {"first_step_peak_bytes": None, "base_bytes": 0, "graph_pool_bytes": 0}
        """Of the result, in bytes; `graph_pool_bytes` is what CUDA graphs have for themselves in the last step."""
        self.series: dict[str, list[Any]] = {name: [] for name in SERIES}  # of the result, a value a step
        self.trace: StepTrace | None = None
        self.turns: TurnTaker | None = None

    def model_is_built(self, model: Any) -> Any:
        """Take the peak of building the model, from where that of the optimizer and of a load is counted anew."""
        self.figures["peak_model_bytes"] = torch.cuda.max_memory_allocated()  # DDP holds the weights twice for a moment
        self.figures["model_bytes"] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if self._options.fused_wgrad:
            # Not by `model.gradient_accumulation_fusion`, for which mcore's own layers need Apex.
            for module in (module for chunk in model for module in chunk.modules()):
                if hasattr(module, "fuse_wgrad_accumulation"):
                    module.fuse_wgrad_accumulation = True
        return model

    def timed(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward step with what is measured around it."""
        return self._clock.timed(forward_step)

    @override
    def on_train_start(self, context: Any) -> None:
        self.figures["peak_setup_bytes"] = torch.cuda.max_memory_allocated()
        if self._options.turns is not None:
            self.turns = TurnTaker(self._options.turns, torch.distributed.get_world_size())
        if torch.distributed.get_rank() == 0:
            self.writer = EventWriter(self._options.events)
            self.writer.start(torch.cuda.get_device_name())

    @override
    def on_train_step_start(self, context: Any) -> None:
        # A step lasts until the next one begins. Only the compute stream is waited for: copies may go on
        # from one step into the next, as they do in training. Bridge saves before the next step begins, so a save is
        # in the seconds of the step before it.
        torch.cuda.current_stream().synchronize()
        self.end_step(time.perf_counter())
        if self._options.finish_saves:
            # A job saves so rarely that its writer is done long before the next save, which would else wait for it.
            maybe_finalize_async_save(context.state, context.state.cfg.checkpoint, blocking=True)
        self.step += 1
        self.await_turn(self.step)
        measured = self._options.steps
        if self.step == measured + 1 and self._options.save is not None:
            context.state.cfg.checkpoint.save_interval = 0  # Bridge's word for no more saves, nor one at the end
        if self.step == measured + self._options.extra_steps + 1:
            self.trace = StepTrace()
        if self.trace is not None:
            self.trace.begin_step()
        elif self.step == min(FIRST_MEASURED_STEP, measured):
            torch.cuda.reset_peak_memory_stats()
            self.figures["base_bytes"] = torch.cuda.memory_allocated()
        if self.step == FIRST_COUNTED_STEP:
            # No later collection looks through what lives now. A full one takes 0.6 to 0.9 s on an H100's host, as long
            # as a step, and comes in another step in each arm and on each rank. Jobs have `train.manual_gc` for it.
            gc.collect()
            gc.freeze()
        self.started = time.perf_counter()

    @override
    def on_train_step_end(self, context: Any) -> None:
        if self.trace is not None:
            self.trace.end_step()
            return
        if self.step > self._options.steps:
            return
        stats = bridge_fgo.stats()
        self.sample_peaks(stats)
        loss = (context.loss_dict or {}).get("lm loss")
        loss = None if loss is None else float(loss)
        if self._options.pp > 1:  # only the last pipeline stage has it, and rank 0 is in the first
            loss = next((value for value in gather(loss) if value is not None), None)
        peaks = max(figure(stats, f"peak_{phase}_bytes") for phase in PHASES)
        self.newest = dict(
            step=self.step,
            peak_bytes=None if stats is None else peaks,
            loss=loss,
            grad_norm=None if context.grad_norm is None else float(context.grad_norm),
            skipped=bool(context.skipped_iter),
            passes=1,  # the rerun machine is off here: one forward and backward pass
        )
        if self.turns is not None:
            self.newest["turn"] = self.turns.turn

    @override
    def on_checkpoint_save(self, context: Any) -> None:
        # Bridge calls it when a checkpoint is complete: with --finish-saves before the next step begins.
        self.series["save_steps"].append(self.step)

    def await_turn(self, step: int) -> None:
        """Wait until this arm has the GPU for `step`, where other arms train on it in turn."""
        if self.turns is None or self.turns.has_another_step():
            return
        # Race: this arm's copies and collectives that are not done would run in another arm's turn, and slow it down.
        torch.cuda.synchronize()
        # The others need the room. The first step of a turn, which does not count, allocates anew.
        torch.cuda.empty_cache()
        self.turns.take()
        self._clock.begin_turn(step)

    def end_step(self, now: float) -> None:
        """Write the event of the step that ended at `now`, if it is among those that are measured."""
        if not self.newest:
            return
        self.series["step_seconds"].append(now - self.started)
        if self.writer is not None:
            self.writer.step(**self.newest, seconds=now - self.started)
        self.newest = {}

    def sample_peaks(self, stats: Stats | None) -> None:
        """Take the newest step's peaks into account: the allocator's, and ours, which reset these by phase."""
        phases = {name: figure(stats, f"peak_{name}_bytes") for name in PHASES}
        if self.step == 1 and stats is not None:
            self.figures["first_step_peak_bytes"] = phases["step"]
        if self.step < min(FIRST_MEASURED_STEP, self._options.steps):
            return
        self.series["enqueue_seconds"].append(figure(stats, "enqueue_seconds"))
        newest = {
            "allocated": max(torch.cuda.max_memory_allocated(), *phases.values()),
            "reserved": max(torch.cuda.max_memory_reserved(), figure(stats, "peak_reserved_bytes")),
            **(phases if stats is not None else {}),  # else nobody told the phases of a step apart
        }
        self.peaks = {name: max(self.peaks.get(name, 0), value) for name, value in newest.items()}
        if self.step == self._options.steps:
            pools = filter(is_graphs, segments())  # takes too long for every step
            self.figures["graph_pool_bytes"] = sum(segment["total_size"] for segment in pools)

    @override
    def on_train_end(self, context: Any) -> None:
        torch.cuda.synchronize()
        self.end_step(time.perf_counter())
        self.await_turn(self.step + 1)  # digests keep the host busy and the link, too
        gc.unfreeze()
        if self.trace is not None:
            self.trace.end(self._options.trace if self.writer is not None else None)
        digests, state_bytes = self.final_digests(context)
        if self.writer is None:
            return
        stats = bridge_fgo.stats()
        peaks: dict[str, int | None] = dict.fromkeys(PHASES) | self.peaks
        self.writer.result(
            digests=digests,
            engine=self.engine(None if stats is None else stats.engine),
            state_bytes=state_bytes,
            released_bytes=figure(stats, "released_bytes"),
            copied_bytes=figure(stats, "bytes_offloaded"),
            pinned_bytes=figure(stats, "pinned_bytes"),
            pin_seconds=figure(stats, "pin_seconds"),
            **{name: figure(stats, name) for name in GRADIENT_FIGURES},
            phase_seconds=self._clock.medians(),
            **self.series,
            **self.figures,
            **{f"peak_{name}_bytes": value for name, value in peaks.items()},
        )

    def engine(self, moved: str | None) -> str | None:
        """Return what has moved the states, by what `Stats` says; None in a resident run."""
        if self._options.hybrid:
            return "hybrid"
        return "mcore generation 2" if self._options.layer_wise else moved

    def final_digests(self, context: Any) -> tuple[dict[str, str], int]:
        """Return the digests of what training left behind, over all ranks, and the bytes of this rank's states."""
        if self._options.digest_by_parameter:
            mine, state_bytes = digests_by_parameter(context.model, context.optimizer)
            return digests_of_ranks(mine), state_bytes
        bridge_fgo.reload_states()
        state = final_state(context.model, context.optimizer)
        tensors = [tensor for part in ("masters", "moments") for tensor in state[part].values()]
        return joined_digests(state), sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class CpuRecorder(ArmRecorder):
    """Samples the bytes of live states, in the place of an allocator's peaks: as a forward begins, and after a step."""

    @override
    def on_train_step_start(self, context: Any) -> None:
        super().on_train_step_start(context)
        self._context: Any = context

    @override
    def timed(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._sample("forward_backward")
            return forward_step(*args, **kwargs)

        return super().timed(step)

    @override
    def sample_peaks(self, stats: Stats | None) -> None:
        self._sample("step")

    def _sample(self, phase: str) -> None:
        live = live_state_bytes(self._context.model, self._context.optimizer)
        self.peaks |= {name: max(self.peaks.get(name, 0), live) for name in (phase, "allocated")} | {"reserved": 0}
