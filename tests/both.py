"""A training with its states resident and the same with offload, compared bit for bit."""

from __future__ import annotations

import dataclasses

import bridge_fgo
from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining, run
from bridge_fgo.tools.arms.record import RunRecord

_kept: dict[CpuOptions, list[RunRecord]] = {}
"""What resident trainings were after each of their steps, by options."""


def numbers(record):
    """Return what each step reported, as exact values."""
    return [(s.loss, s.grad_norm, s.skipped, s.passes) for s in record.steps]


def resident(steps, **options):
    """Return the record of so many resident steps. Trains once for all tests: the longest has the shorter ones in it.

    Not for a test that patches what trains.
    """
    wanted = CpuOptions(**options)
    kept = _kept.setdefault(wanted, [])
    if len(kept) < steps and not (kept and kept[-1].steps[-1].exit_code is not None):
        kept.clear()
        peak = peak_step = 0
        with CpuTraining(wanted) as training:
            while len(kept) < steps and not training.exited:
                done = [*(kept[-1].steps if kept else []), training.step()]
                peak = max(peak, *training.live_bytes)
                peak_step = max(peak_step, training.live_state_bytes())
                kept.append(
                    RunRecord(
                        steps=done,
                        digests=training.digests(),
                        state_bytes=training.live_state_bytes(),
                        peak_forward_backward_bytes=peak,
                        peak_step_bytes=peak_step,
                    )
                )
    return dataclasses.replace(kept[min(steps, len(kept)) - 1])


def both(config, steps, **options):
    """Train resident and offloaded, and assert that numbers and bits are equal.

    Returns:
        Both records, and the newest figures of the offloaded run.
    """
    expected, figures = resident(steps, **options), []
    with bridge_fgo.install(config):
        record = run(CpuOptions(offload=True, **options), steps, lambda step: figures.append(bridge_fgo.stats()))
    assert numbers(record) == numbers(expected)
    assert record.digests == expected.digests and len(expected.digests) == 3
    return expected, record, figures[-1]
