"""Peaks of a run that leaves the flag unset, in the phases of an offloaded run, so that the two can be compared.

Bridge samples the memory that is allocated after a step. What tells whether a job fits is the peak within it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bridge_fgo.bridge.finalize import reload_hook
from bridge_fgo.memory.meters import PeakMeter

MEASUREMENT = "_bridge_fgo_measurement"
_measurements: weakref.WeakSet[Measurement] = weakref.WeakSet()


class Measurement:
    """Reads the peaks of the training steps of one optimizer, on which it hangs.

    Reading them resets the allocator's peak counters, as the offload's own figures do: Bridge's report of memory has
    the peaks of the run all the same (`wrappers.report_memory`).
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
