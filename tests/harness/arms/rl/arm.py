"""One run of the GRPO loop, which sleeps between updates or does not.

    PYTHONPATH=tests python -m harness.arms.rl.arm --options '{"steps": 20}' --events events.jsonl
    PYTHONPATH=tests torchrun --nproc-per-node 4 -m harness.arms.rl.arm --options '{"device": "cuda", "tp": 2}' ...

Rank 0 writes the events that `bridge-fgo demo --rl` reads. Digests cover every rank; bytes and seconds are rank 0's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from harness.arms.gpu import have_the_cpu_stand_in, make_deterministic
from harness.arms.rl.options import RlOptions


def parse(arguments: Sequence[str] | None = None) -> tuple[RlOptions, Path]:
    """Return the options and the file of events; what cannot be parsed ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.arms.rl.arm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--events", type=Path, required=True, help="file to append JSON events to")
    parser.add_argument("--options", type=json.loads, default={}, help="fields of RlOptions, as a JSON object")
    given = parser.parse_args(arguments)
    return RlOptions(**given.options), given.events


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one arm. What goes wrong ends the process with a traceback and a status other than 0."""
    options, events = parse(arguments)
    os.environ.setdefault("TQDM_DISABLE", "1")  # mcore's engine has a bar for each call
    if options.device == "cpu":
        have_the_cpu_stand_in()
    else:
        make_deterministic()
    import torch

    from harness.arms.final_state import final_state, joined_digests
    from harness.arms.rl.loop import Loop
    from harness.arms.rl.neighbour import Neighbour
    from harness.arms.runner import EventWriter

    with contextlib.ExitStack() as stack:
        writer = None
        if os.environ.get("RANK", "0") == "0":
            writer = EventWriter(events)
            stack.callback(writer.close)
            writer.start("cpu" if options.device == "cpu" else torch.cuda.get_device_name())
        neighbour = None
        if options.device == "cuda" and options.sleep:
            neighbour = stack.enter_context(Neighbour(f"cuda:{os.environ.get('LOCAL_RANK', '0')}"))
        loop = Loop(options, neighbour)
        stack.callback(loop.close)
        phases = []
        for number in range(1, options.steps + 1):
            iteration = loop.iterate(number)
            phases += iteration.phases
            if writer is not None:
                writer.step(**vars(iteration), passes=1, seconds=iteration.phases[-1]["at"])
        digests = joined_digests(final_state(loop.trainer.model, loop.trainer.optimizer))
        if writer is None:
            return
        memory = loop.diary.memory()
        writer.result(
            digests=digests,
            engine="native" if options.sleep else None,
            state_bytes=memory["optimizer"],
            released_bytes=max(phase.get("freed", 0) for phase in phases),
            pinned_bytes=loop.policy.pinned_bytes + loop.reference.pinned_bytes if options.sleep else 0,
            bytes_by_kind=memory,
        )


if __name__ == "__main__":
    main()
