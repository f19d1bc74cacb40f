"""One training arm on the CPU: a small GPT through Bridge's own `train_step`, on made-up data.

    python tests/cpu_arm.py --steps 20 --offload on --events events.jsonl

Transformer Engine and CUDA stand in, as `bridge_fgo.tools.standins` says, so this shows whether two
arms are bitwise equal and how many bytes go, not how fast they go.

There is no allocator to ask for peaks. `peak_forward_backward_bytes` and `peak_step_bytes` are bytes of
live optimizer state alone: the largest sample taken as a microbatch's forward begins, and the largest taken
after a step. `peak_allocated_bytes` is the larger of the two; `peak_reserved_bytes` is 0.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bridge_fgo.options import add_offload_options, offload_config

if TYPE_CHECKING:
    from cpu_training import StepRecord


def step_numbers(text: str) -> frozenset[int]:
    """Parse "3,5" into {3, 5}."""
    return frozenset(int(number) for number in text.split(","))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; what cannot be parsed ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog="python tests/cpu_arm.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--events", type=Path, required=True, help="file to append JSON events to")
    for name in ("rerun-steps", "grad-norm-skip-steps"):
        parser.add_argument(f"--{name}", type=step_numbers, default=frozenset(), help="see CpuOptions; as in 3,5")
    offload = parser.add_argument_group("offload")
    offload.add_argument("--offload", choices=("off", "on"), default="off")
    add_offload_options(offload)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one arm. What goes wrong ends the process with a traceback and a status other than 0."""
    options = parse(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: nothing may take a GPU that is there
    from cpu_training import CpuOptions, run

    from bridge_fgo.tools.arms.record import EventWriter
    from bridge_fgo.tools.standins.cuda import install_standins

    install_standins()
    import bridge_fgo

    if options.offload == "on":
        bridge_fgo.install(offload_config(options))
    writer = EventWriter(options.events)
    writer.start("cpu")
    stats = None

    def on_step(step: StepRecord) -> None:
        nonlocal stats
        writer.step(**vars(step))
        stats = bridge_fgo.stats()  # now, because the figures go when the optimizer goes

    training = CpuOptions(
        offload=options.offload == "on",
        rerun_steps=options.rerun_steps,
        grad_norm_skip_steps=options.grad_norm_skip_steps,
    )
    record = run(training, options.steps, on_step)
    writer.result(
        digests=record.digests,
        engine=None if stats is None else stats.engine,
        state_bytes=record.state_bytes,
        released_bytes=0 if stats is None else stats.released_bytes,
        pinned_bytes=0 if stats is None else stats.pinned_bytes,
        peak_allocated_bytes=max(record.peak_forward_backward_bytes, record.peak_step_bytes),
        peak_reserved_bytes=0,
        peak_forward_backward_bytes=record.peak_forward_backward_bytes,
        peak_step_bytes=record.peak_step_bytes,
    )
    writer.close()


if __name__ == "__main__":
    main()
