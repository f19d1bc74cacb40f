"""Compares the offload in Bridge's loop, by the flag, with that in a loop of one's own: E of both, in one run.

    python tests/gpu/loops.py

Three arms are alive at once and train in turn: resident, with the flag, and by `Residency.training_step`. E is what a
step got longer by, over the time in which the states cross the link once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import phases_arm

from bridge_fgo.tools.arms.runner import ArmProcess, ArmRun
from bridge_fgo.tools.bench.in_turn import WARM_UP_STEPS, InTurn

HERE = Path(__file__).parent
MOST_APART = 0.1
"""By how much E may differ between the loops."""
SIZE = "--hidden 2048 --ffn 8192 --heads 16 --seq 2048 --mbs 2 --gbs 8 --no-deterministic"
ARMS = {
    "resident": ("bridge_fgo.tools.arms.gpu", ["--offload", "off"]),
    "flag": ("bridge_fgo.tools.arms.gpu", ["--offload", "on", "--engine", "native"]),
    "own loop": ("loop_arm", ["--offload", "off"]),
}


def step_seconds(run: ArmRun, rounds: int) -> float:
    """Returns the median of the steps in turns that count, without the first of each."""
    counted, newest = [], None
    for step in run.steps:
        if step.get("turn") == newest and 1 <= step["turn"] <= rounds:
            counted.append(step["seconds"])
        newest = step.get("turn")
    return statistics.median(counted)


def main(arguments: list[str] | None = None) -> int:
    """Runs the arms, and prints; returns the status to exit with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="16: 1.0 billion parameters, all arms in some 60 GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn-steps", type=int, default=5)
    options = parser.parse_args(arguments)
    steps = WARM_UP_STEPS + options.rounds * options.turn_steps
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    with TemporaryDirectory() as folder:

        def start(name: str, address: Path) -> ArmProcess:
            module, more = ARMS[name]
            size = ["--layers", str(options.layers), *SIZE.split(), "--steps", str(steps), "--turns", str(address)]
            return ArmProcess(name.replace(" ", "_"), module, [*size, *more], Path(folder))

        turns = InTurn(
            list(ARMS), start, options.rounds, options.turn_steps, 200.0, lambda name: name == "resident", print
        )
        turns.run()
    if turns.failures:
        return 1
    link = phases_arm.link()
    seconds = {name: step_seconds(run, options.rounds) for name, run in turns.results.items()}
    resident = turns.results["resident"].result
    across = resident["state_bytes"] / min(link.values())
    e = {name: (value - seconds["resident"]) / across for name, value in seconds.items()}
    states = f"states {resident['state_bytes'] / 1e9:.2f} GB"
    print(f"link {link['out'] / 1e9:.1f} GB/s out, {link['back'] / 1e9:.1f} back; {states}")
    fails = abs(e["own loop"] - e["flag"]) > MOST_APART
    losses = turns.results["resident"].values("loss")
    for name, run in turns.results.items():
        equal = run.result["digests"] == resident["digests"] and run.values("loss") == losses
        fails |= not equal
        held, away = (f"{run.result[key] / 1e9:.2f} GB" for key in ("peak_allocated_bytes", "released_bytes"))
        print(
            f"{name}: {seconds[name]:.4f} s a step, E {e[name]:.3f}, {held} allocated, {away} released, "
            f"bits {'equal' if equal else 'DIFFER'}"
        )
    print("FAILS" if fails else "passes")
    return int(fails)


if __name__ == "__main__":
    sys.exit(main())
