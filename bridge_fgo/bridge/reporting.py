"""Print and log the figures of the offload, and measure the peaks of a run that leaves the flag unset."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bridge_fgo.bridge.points import reload_hook
from bridge_fgo.memory.meters import PeakMeter


def say(text: str) -> None:
    """Print a line on rank 0."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(f"bridge_fgo: {text}", flush=True)


def warn(text: str) -> None:
    """Print a line on the rank that it concerns, whichever that is."""
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    print(f"bridge_fgo: {f'rank {torch.distributed.get_rank()}: ' if several else ''}{text}", flush=True)


def log_scalars(scalars: dict[str, float], state: Any) -> None:
    """Write figures to TensorBoard and W&B, at the steps at which Bridge writes its own.

    Args:
        scalars: figures of the step that has just ended, by tag.
        state: Bridge's GlobalState; its step counter is advanced after the training step.
    """
    logger_config = getattr(state.cfg, "logger", None)
    interval = getattr(logger_config, "tensorboard_log_interval", None)
    if not isinstance(interval, int) or interval < 1:
        return
    iteration = state.train_state.step + 1
    if iteration % interval:
        return
    if state.tensorboard_logger:
        for tag, value in scalars.items():
            state.tensorboard_logger.add_scalar(tag, value, iteration)
    if state.wandb_logger:
        state.wandb_logger.log(scalars, iteration)


MEASUREMENT = "_bridge_fgo_measurement"
_measurements: weakref.WeakSet[Measurement] = weakref.WeakSet()


class Measurement:
    """Reads the peaks of the training steps of one optimizer, on which it hangs, in the phases of an offloaded run.

    So the two can be compared: Bridge samples the memory that is allocated after a step, and what tells whether a job
    fits is the peak within it. Reading the peaks resets the allocator's counters, as the offload's own figures do.
    Bridge's report of memory has the peaks of the run all the same (`train_step.report_memory`).
    """

    def __init__(self) -> None:
        self._meter = PeakMeter()
        self._forward_backward: int | None = None
        self.scalars: dict[str, float] = {}
        """Figures of the newest step in bytes, by the tags of `bridge_fgo.Stats.scalars`; no peaks without a GPU."""
        _measurements.add(self)

    @property
    def run_peaks(self) -> dict[str, int]:
        """Highest value so far of each of the allocator's peak counters."""
        return self._meter.run_peaks

    @contextmanager
    def training_step(self, model_config: Any) -> Iterator[None]:
        """Context of a training step; `finalize_model_grads_func` of the config says when backward is done."""
        self._meter.end_phase()  # what came between the steps is nobody's
        self._meter.reserved_bytes, self._forward_backward = 0, None
        with reload_hook(model_config, self._backward_is_done):
            yield
        peaks = {
            "peak_forward_backward_bytes": self._forward_backward,
            "peak_step_bytes": self._meter.end_phase(),
            "peak_reserved_bytes": self._meter.reserved_bytes if self._meter.works else None,
        }
        known = {name: value for name, value in peaks.items() if value is not None}
        self.scalars = {f"bridge_fgo/{name}": value for name, value in {"released_bytes": 0, **known}.items()}

    def _backward_is_done(self) -> None:
        peak = self._meter.end_phase()
        if peak is not None:
            self._forward_backward = max(peak, self._forward_backward or 0)


def measurement_of(optimizer: Any) -> Measurement:
    """Return the measurement of an optimizer, made on the first call."""
    found: Measurement | None = vars(optimizer).get(MEASUREMENT)
    if found is None:
        found = Measurement()
        setattr(optimizer, MEASUREMENT, found)
    return found


def measured_peaks() -> Iterator[dict[str, int]]:
    """Yield the peak counters of the runs that are measured."""
    for measurement in list(_measurements):
        yield measurement.run_peaks
