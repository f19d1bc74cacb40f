"""The trace of a step: how much of the copies lies beside computation, and who waited for the GPU."""

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
    waits: list[tuple[float, float, str]]
    """(duration, start, function) of calls on the host that waited for the GPU, the longest first."""
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
        waits=sorted(((took, start, name) for name, start, took in raw["host"]), reverse=True),
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


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def overlap(a: list[Interval], b: list[Interval]) -> float:
    """Return the length of the intersection of two unions of intervals, each in order and disjoint."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
