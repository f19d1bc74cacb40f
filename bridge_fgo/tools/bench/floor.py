"""The floor: the least time that the copies of a step can add to it."""

from __future__ import annotations


def floor_seconds(
    nbytes: int, d2h: float, h2d: float, duplex: float, backward: float, first_forward: float, between: float, room: int
) -> float:
    """Return the least time in seconds that a step can get longer by when `nbytes` are copied out and come back.

    States may come back in the last microbatch's backward, and leave in the next first forward, at the full bandwidth
    of one direction. They are updated only when the gradients are final; from then on what is left goes both ways at
    once, until the last is updated and forward begins. A resident run does its update in that time too, so its own time
    `between` backward and forward is not lost.

    Bandwidths are bytes a second: `d2h` and `h2d` in one direction alone, `duplex` each way with both busy. `room` is
    the bytes that activations take and give back; no more may be on the way during forward or backward.
    """
    early = min(nbytes, h2d * backward, room)
    both_ways = (nbytes - early) / duplex
    out_left = early  # as much has not left yet when the last has come and been updated
    late = min(out_left, room)
    span = both_ways + (out_left - late) / d2h + max(late / d2h, first_forward)
    return max(0.0, span - between - first_forward)
