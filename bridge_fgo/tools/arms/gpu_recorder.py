"""What the GPU arm measures of its run and writes down: a callback of Bridge's."""

from __future__ import annotations

import argparse
import time
from typing import Any, override

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.checkpointing import maybe_finalize_async_save

import bridge_fgo
from bridge_fgo.figures import Stats
from bridge_fgo.memory.meters import COMMON_POOL
from bridge_fgo.tools.arms.collector_clock import CollectorClock
from bridge_fgo.tools.arms.final_state import (
    digests_by_parameter,
    digests_of_ranks,
    final_state,
    joined_digests,
    of_ranks,
)
from bridge_fgo.tools.arms.host_loop import host_loop_seconds
from bridge_fgo.tools.arms.moves_alone import MovesAlone
from bridge_fgo.tools.arms.phase_clock import FIRST_COUNTED_STEP, PhaseClock
from bridge_fgo.tools.arms.record import EventWriter
from bridge_fgo.tools.arms.step_trace import StepTrace
from bridge_fgo.tools.arms.turns import TurnTaker

FIRST_MEASURED_STEP = 4
"""From this step on moments exist and buffers are warm: peaks are those of all steps that come."""


def enqueue_seconds(stats: Stats | None) -> float:
    """Return the host's seconds for the moves of the newest step; 0 without offload."""
    return 0.0 if stats is None else stats.enqueue_seconds


class Recorder(Callback):
    """Measures the run and, on rank 0, writes its events.

    Args:
        options: the arm's.
        clock: of the phases of a step.
    """

    def __init__(self, options: argparse.Namespace, clock: PhaseClock) -> None:
        self._options = options
        self._clock = clock
        self.writer: EventWriter | None = None
        self.step = 0
        self.started = 0.0
        self.seconds: list[float] = []
        self.collector = CollectorClock()
        self.collector_seconds: list[float] = []
        self.host_loop_seconds: list[float] = []
        self.trained = 0.0
        self.between_seconds: list[float] = []
        self.save_steps: list[int] = []
        self.newest: dict[str, Any] = {}
        self.peaks: dict[str, Any] = {}
        self.first_step_peak: int | None = None
        self.setup: dict[str, int] = {}
        self.base = 0
        self.pools = 0
        """Bytes that CUDA graphs have for themselves in the last step."""
        self.enqueue: list[float] = []
        self.enqueue_alone: list[float] = []
        self.alone: MovesAlone | None = None
        self.trace: StepTrace | None = None
        self.turns: TurnTaker | None = None

    def model_is_built(self, model: Any) -> Any:
        """Take the peak of building the model, from where that of the optimizer and of a load is counted anew."""
        self.setup = {
            "peak_model_bytes": torch.cuda.max_memory_allocated(),  # mcore's DDP holds the weights twice for a moment
            "model_bytes": torch.cuda.memory_allocated(),
        }
        torch.cuda.reset_peak_memory_stats()
        return model

    @override
    def on_train_start(self, context: Any) -> None:
        self.setup["peak_setup_bytes"] = torch.cuda.max_memory_allocated()
        if self._options.turns is not None:
            ranks = torch.distributed.get_world_size()
            self.turns = TurnTaker(self._options.turns, torch.distributed.get_rank(), ranks)
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
        if self.turns is not None and self.turns.ends_early and self.step < self._options.steps:
            self.end_with_this_step(context.state.cfg.train)
        if self.step <= self._options.steps:
            # Between the last step's end and this one's begin, so that it is in neither's seconds. Of the phases
            # `rest` has it, and copies go on meanwhile: a thousandth of a step, in all arms alike.
            self.host_loop_seconds.append(host_loop_seconds())
        if self.step == self._options.steps + 1 and self._options.save is not None:
            context.state.cfg.checkpoint.save_interval = 0  # Bridge's word for no more saves, nor one at the end
        if self.step == self._options.steps + 1 and self._options.alone_steps:
            self.alone = MovesAlone(torch.cuda.current_stream())
        if self.step == self._options.steps + self._options.alone_steps + 1:
            self.end_alone()
            self.trace = StepTrace()
        if self.trace is not None:
            self.trace.begin_step()
        elif self.step == min(FIRST_MEASURED_STEP, self._options.steps):
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
        if self.step == FIRST_COUNTED_STEP:
            self.collector.forget_what_lives()
        self.collector.take()  # what came before the first step is of none
        self.started = time.perf_counter()

    @override
    def on_train_step_end(self, context: Any) -> None:
        self.trained = time.perf_counter()
        if self.trace is not None:
            self.trace.end_step()
            return
        if self.alone is not None:
            self.enqueue_alone.append(enqueue_seconds(bridge_fgo.stats()))
            return
        self.sample_peaks()
        loss = (context.loss_dict or {}).get("lm loss")
        loss = None if loss is None else float(loss)
        if self._options.pp > 1:  # only the last pipeline stage has it, and rank 0 is in the first
            loss = next((value for value in of_ranks(loss) if value is not None), None)
        stats = bridge_fgo.stats()
        self.newest = dict(
            step=self.step,
            peak_bytes=None
            if stats is None
            else max(stats.peak_forward_backward_bytes or 0, stats.peak_step_bytes or 0),
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
        self.save_steps.append(self.step)

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

    def end_with_this_step(self, train: Any) -> None:
        """Have the step that begins be the last of those that are measured; `train`: Bridge's settings."""
        train.train_iters -= self._options.steps - self.step
        self._options.steps = self.step
        self._clock.end_with(self.step)

    def end_alone(self) -> None:
        """Make moves as in training again."""
        if self.alone is not None:
            self.alone.end()
            self.alone = None

    def end_step(self, now: float) -> None:
        """Write the event of the step that ended at `now`, if it is among those that are measured."""
        if not self.newest:
            return
        self.seconds.append(now - self.started)
        self.between_seconds.append(now - self.trained)
        self.collector_seconds.append(self.collector.take())
        if self.writer is not None:
            self.writer.step(**self.newest, seconds=self.seconds[-1])
        self.newest = {}

    def sample_peaks(self) -> None:
        """Take the newest step's peaks into account.

        The package resets the allocator's peaks between the phases of a step, to tell
        them apart. So its own figures, where it is at work, complete the allocator's.
        """
        stats = bridge_fgo.stats()
        if self.step == 1 and stats is not None:
            self.first_step_peak = stats.peak_step_bytes
        if self.step < min(FIRST_MEASURED_STEP, self._options.steps):
            return
        forward_backward = 0 if stats is None else stats.peak_forward_backward_bytes or 0
        step = 0 if stats is None else stats.peak_step_bytes or 0
        reserved = 0 if stats is None else stats.peak_reserved_bytes or 0
        self.enqueue.append(enqueue_seconds(stats))
        newest = {
            "allocated": max(torch.cuda.max_memory_allocated(), forward_backward, step),
            "reserved": max(torch.cuda.max_memory_reserved(), reserved),
            "forward_backward": forward_backward,
            "step": step,
        }
        self.peaks = {name: max(self.peaks.get(name, 0), value) for name, value in newest.items()}
        if self.step == self._options.steps:
            segments = torch.cuda.memory_snapshot()  # takes too long for every step
            self.pools = sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != COMMON_POOL)

    @override
    def on_train_end(self, context: Any) -> None:
        torch.cuda.synchronize()
        self.end_step(time.perf_counter())
        self.await_turn(self.step + 1)  # digests keep the host busy and the link, too
        self.collector.end()
        self.end_alone()
        if self.trace is not None:
            self.trace.end(self._options.trace if self.writer is not None else None)
        digests, state_bytes = self.final_digests(context)
        phases = of_ranks(self._clock.medians())
        host_loops = of_ranks(self.host_loop_seconds)
        stats = bridge_fgo.stats()
        precedence = of_ranks(None if stats is None else (stats.copies_in_first, stats.copy_wait_seconds))
        if self.writer is None:
            return
        if stats is None:  # nobody told the phases of a step apart
            self.peaks.update(forward_backward=None, step=None)
        self.writer.result(
            digests=digests,
            engine=self.engine(stats),
            state_bytes=state_bytes,
            released_bytes=0 if stats is None else stats.released_bytes,
            copied_bytes=0 if stats is None else stats.bytes_offloaded,
            pinned_bytes=0 if stats is None else stats.pinned_bytes,
            step_seconds=self.seconds,
            collector_seconds=self.collector_seconds,
            host_loop_seconds_of_ranks=host_loops,
            between_seconds=self.between_seconds,
            save_steps=self.save_steps,
            base_bytes=self.base,
            graph_pool_bytes=self.pools,
            first_step_peak_bytes=self.first_step_peak,
            **self.setup,
            pin_seconds=0.0 if stats is None else stats.pin_seconds,
            enqueue_seconds=self.enqueue,
            enqueue_alone_seconds=self.enqueue_alone,
            phase_seconds=phases[0],
            phase_seconds_of_ranks=phases,
            copies_in_first_of_ranks=[each and each[0] for each in precedence],
            copy_wait_seconds_of_ranks=[each and each[1] for each in precedence],
            **{f"peak_{name}_bytes": value for name, value in self.peaks.items()},
        )

    def engine(self, stats: Stats | None) -> str | None:
        """Return what has moved the states; None in a resident run."""
        if self._options.hybrid:
            return "hybrid"
        if self._options.layer_wise:
            return "mcore generation 2"
        return None if stats is None else stats.engine

    def final_digests(self, context: Any) -> tuple[dict[str, str], int]:
        """Return the digests of what training left behind, over all ranks, and the bytes of this rank's states."""
        if self._options.digest_by_parameter:
            mine, state_bytes = digests_by_parameter(context.model, context.optimizer)
            return digests_of_ranks(mine), state_bytes
        bridge_fgo.reload_states()
        state = final_state(context.model, context.optimizer)
        tensors = [tensor for part in ("masters", "moments") for tensor in state[part].values()]
        return joined_digests(state), sum(tensor.numel() * tensor.element_size() for tensor in tensors)
