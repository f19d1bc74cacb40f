"""Compares the offload in Bridge's loop, by the flag, with that in a loop of one's own: E of both, in one run.

    python tests/gpu/loops.py

Three arms are alive at once and train in turn: resident, with the flag, and by `Residency.training_step`. E is what a
step got longer by, over the time in which the states cross the link once: the median over rounds.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from bridge_fgo.tools.link import probe

sys.path.append(str(Path(__file__).parents[1]))

from harness.bench.figures import rounds_of
from harness.bench.in_turn import WARM_UP_STEPS, InTurn

HERE = Path(__file__).parent
MOST_APART = 0.1
"""By how much E may differ between the loops."""
SIZE = "--hidden 2048 --ffn 8192 --heads 16 --seq 2048 --mbs 2 --gbs 8 --no-deterministic"
ARMS = {
    "resident": (["--offload", "off"], {}),
    "flag": (["--offload", "on", "--engine", "native"], {}),
    "own loop": (["--offload", "off"], {"OWN_LOOP": "native"}),
}
"""Options and environment of `changed_arm`."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the arms, and prints; returns the status to exit with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="16: 1.0 billion parameters, all arms in some 60 GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn-steps", type=int, default=5)
    options = parser.parse_args(arguments)
    steps = WARM_UP_STEPS + options.rounds * options.turn_steps
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    size = ["--layers", str(options.layers), *SIZE.split(), "--steps", str(steps)]
    with TemporaryDirectory() as folder:
        arms = {
            name: {
                "module": "changed_arm",
                "options": [*size, *more],
                "folder": Path(folder),
                "environment": environment,
            }
            for name, (more, environment) in ARMS.items()
        }
        runs, failures = InTurn(arms, options.rounds, options.turn_steps, 200.0, print).run()
    if failures:
        return 1
    link = probe(1)
    rounds = {arm.arm: arm for arm in rounds_of(runs, dict.fromkeys(runs, "resident"), link)}
    resident = runs["resident"].result
    states = f"states {resident['state_bytes'] / 1e9:.2f} GB"
    print(f"link {link['d2h'] / 1e9:.1f} GB/s out, {link['h2d'] / 1e9:.1f} back; {states}")
    e = {name: arm.e or 0.0 for name, arm in rounds.items()}
    fails = abs(e["own loop"] - e["flag"]) > MOST_APART
    losses = runs["resident"].values("loss")
    for name, run in runs.items():
        equal = run.result["digests"] == resident["digests"] and run.values("loss") == losses
        fails |= not equal
        held, away = (f"{run.result[key] / 1e9:.2f} GB" for key in ("peak_allocated_bytes", "released_bytes"))
        print(
            f"{name}: {statistics.median(rounds[name].seconds):.4f} s a step, E {e[name]:.3f}, {held} allocated, "
            f"{away} released, bits {'equal' if equal else 'DIFFER'}"
        )
    print("FAILS" if fails else "passes")
    return int(fails)


if __name__ == "__main__":
    sys.exit(main())
