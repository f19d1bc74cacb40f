"""How fast the host runs Python just now: the time of a fixed loop, which does the same work each time.

A host that others use, too, launches kernels at another speed within seconds, and in several processes at once.
"""

from __future__ import annotations

import time

ADDITIONS = 20_000
"""Additions of one loop: 0.5 to 1 ms. Long beside the clock's resolution, short beside a step of half a second and
beside the tens of milliseconds for which a scheduler lets a process run."""


def host_loop_seconds() -> float:
    """Return the seconds that the loop takes. It allocates nothing that the garbage collector counts."""
    started = time.perf_counter()
    total = 0
    for number in range(ADDITIONS):
        total += number
    return time.perf_counter() - started
