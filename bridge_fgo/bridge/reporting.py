"""Print and log the figures of the offload, and measure the peaks of a run that leaves the flag unset."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bridge_fgo.bridge.points import reload_hook
from bridge_fgo.figures import FORWARD_BACKWARD, REST, Peaks
from bridge_fgo.memory.meters import PeakMeter


def say(text: str) -> None:
    """Print a line on rank 0, as launchers set RANK until torch.distributed is initialized."""
    is_initialized = torch.distributed.is_initialized()
    if str(torch.distributed.get_rank() if is_initialized else os.environ.get("RANK") or 0) == "0":
        print(f"bridge_fgo: {text}", flush=True)


def warn(text: str) -> None:
    """Print a line on the rank that it concerns."""
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    print(f"bridge_fgo: {f'rank {torch.distributed.get_rank()}: ' if several else ''}{text}", flush=True)


def log_scalars(scalars: dict[str, float], state: Any) -> None:
    """Write figures of the step that has just ended to TensorBoard and W&B, at the steps where Bridge does."""
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


_measurements: weakref.WeakKeyDictionary[Any, Measurement] = weakref.WeakKeyDictionary()  # by the optimizer


class Measurement:
    """Reads the peaks of the training steps of one optimizer in the phases of an offloaded run.

    So the two can be compared: Bridge samples the memory that is allocated after a step, and what tells whether a job
    fits is the peak within it. Bridge's own report has the peaks of the run all the same (`train_step.report_memory`).
    """

    def __init__(self) -> None:
        self.peaks = Peaks(PeakMeter())
        self.scalars: dict[str, float] = {}  # of the newest step in bytes, by tag; no peaks without a GPU

    @contextmanager
    def training_step(self, model_config: Any) -> Iterator[None]:
        """Context of a training step; `finalize_model_grads_func` of the config says when backward is done."""
        self.peaks.begin_step()
        with reload_hook(model_config, partial(self.peaks.end_phase, FORWARD_BACKWARD)):
            yield
        self.peaks.end_phase(REST)
        known = {name: value for name, value in self.peaks.figures().items() if value is not None}
        self.scalars = {f"bridge_fgo/{name}": value for name, value in {"released_bytes": 0, **known}.items()}


def measurement_of(optimizer: Any) -> Measurement:
    """Return the measurement of an optimizer, made on the first call."""
    if optimizer not in _measurements:
        _measurements[optimizer] = Measurement()
    return _measurements[optimizer]


def measured_peaks() -> list[dict[str, int]]:
    """Return the peak counters of each run that is measured."""
    return [measurement.peaks.meter.run_peaks for measurement in list(_measurements.values())]
