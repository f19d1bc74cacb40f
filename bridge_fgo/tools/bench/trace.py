"""The trace of a step: kernels, copies and memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BIG_COPY_BYTES = 2**20
"""Copies above this are taken for the offload's; the training loop's own are smaller."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Trace:
    """One step of one arm, in seconds from its begin and bytes."""

    seconds: float
    kernels: list[Interval]
    d2h: list[Interval]
    h2d: list[Interval]
    memory: list[tuple[float, int]]
    """(time, allocated bytes)."""


def read_trace(path: Path) -> Trace:
    """Read the trace that `bridge_fgo.tools.arms.step_trace` wrote."""
    with gzip.open(path, "rt") as file:
        raw = json.load(file)

    def of(kind: str, least: int = 0) -> list[Interval]:
        return merge((start, start + took) for k, start, took, nbytes in raw["gpu"] if k == kind and nbytes >= least)

    return Trace(
        seconds=raw["step"][1],
        kernels=of("kernel"),
        d2h=of("d2h", BIG_COPY_BYTES),
        h2d=of("h2d", BIG_COPY_BYTES),
        memory=[(time, nbytes) for time, nbytes in raw["memory"]],
    )


def merge(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Return the union of intervals, in order; those less than `gap` apart become one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
