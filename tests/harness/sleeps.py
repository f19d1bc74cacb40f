"""Compares sleeps and wakes by a framework's own functions, before and after `install(frameworks=...)`, in one run.

    PYTHONPATH=tests python -m harness.sleeps verl CHECKOUT
    PYTHONPATH=tests python -m harness.sleeps mcore --layers 4

An arm is a process that has the GPU by itself, and sleeps and wakes after each step (`harness.arms.sleeper`). Without a
GPU a tiny model trains. Other options are those of `harness.arms.gpu`. Ends with status 1 if an arm of this package
failed, is not bitwise equal to one that never sleeps, or keeps memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bridge_fgo.tools.link import launcher, probe
from harness.arms.runner import ArmFailed, ArmRun, compare, file_name, run_arm
from harness.arms.sleeper import FILES

ARM = "harness.arms.sleeper"
ARM_SECONDS = 330.0
LEAST_RETURNED = 0.98
"""Share of the bytes of parameters, gradients, masters and moments that the driver has to get in each sleep."""
SIZE = ("--layers", "6", "--hidden", "2048", "--groups", "16", "--vocab", "50304", "--gbs", "4")
HEAD = ("by", "sleep, s", "weights alone wake and sleep, s", "wake, s", "all / ours", "memory returned", "bits")


def run(name: str, options: Sequence[str], ranks: int, folder: Path) -> ArmRun | None:
    """Return an arm that has ended; None where it failed, after what it printed last."""
    try:
        arm = run_arm(name, ARM, [*options], folder, launcher=launcher(ranks), timeout=ARM_SECONDS)
    except ArmFailed as failure:
        print(failure, failure.log_tail, sep="\n", flush=True)
        return None
    log = (folder / f"{file_name(name)}.log").read_text(errors="replace").splitlines()
    print(f"{name}: done", *(line for line in log if line.startswith(("bridge_fgo:", "stand-ins:"))), sep="\n  ")
    return arm


def figures(arm: ArmRun, move: str, figure: str = "seconds") -> list[float]:
    """Return a figure of each sleep but the first, which takes host memory; zeros where there is no such move."""
    return [step["moves"].get(move, {}).get(figure, 0.0) for step in arm.steps[1:]]


def tell(arms: Mapping[str, ArmRun | None], is_on_gpu: bool) -> bool:
    """Print the table; return whether all arms of this package are as they have to be."""
    never, ours = arms["never"], arms["ours"]
    if never is None or ours is None:
        return False
    managed = figures(ours, "sleep", "freed")[-1]
    print(f"\n{managed / 1e9:.2f} GB sleep\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    of_ours, good = 0.0, True
    for name, arm in arms.items():
        if arm is None:
            good &= not name.endswith("ours")
            continue
        if arm is never:
            continue
        took = [statistics.median(figures(arm, move)) for move in ("sleep", "sync", "wake")]
        of_ours = of_ours or sum(took)
        returned = min(figures(arm, "sleep", "returned")) / managed
        equal = compare(never, arm).bitwise_equal
        cells = [name, *(f"{seconds:.3f}" for seconds in took), f"{sum(took) / of_ours:.1f}", f"{returned:.3f}"]
        print(f"| {' | '.join([*cells, 'equal' if equal else 'DIFFER'])} |")
        good &= not name.endswith("ours") or (equal and (not is_on_gpu or returned >= LEAST_RETURNED))
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the arms, and print; return the status to exit with."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("by", choices=("mcore", *FILES))
    parser.add_argument("checkout", type=Path, nargs="?", help="of the framework")
    parser.add_argument("--ranks", type=int, default=1, help="of data parallelism, each with a GPU")
    options, others = parser.parse_known_args(arguments)
    if (options.checkout is None) == (options.by in FILES):
        parser.error(f"{options.by}: give {'its checkout' if options.by in FILES else 'no checkout'}")
    is_on_gpu = torch.cuda.is_available()
    common = ["--no-dp-overlap", "--steps", "7", *(SIZE if is_on_gpu else ("--cpu",)), *others]
    theirs = ["--by", options.by, *(["--checkout", str(options.checkout)] if options.checkout else [])]
    named = {"never": ["--by", "never"], "ours": ["--by", "ours"], options.by: theirs}
    if options.by in FILES:
        named[f"{options.by}+ours"] = [*theirs, "--with-ours"]
    with TemporaryDirectory() as folder:
        arms = {name: run(name, [*own, *common], options.ranks, Path(folder)) for name, own in named.items()}
    good = tell(arms, is_on_gpu)
    if is_on_gpu and (ours := arms["ours"]) is not None:
        link = probe(options.ranks)
        alone = [figures(ours, move, "copied")[-1] / link[way] for move, way in (("sleep", "d2h"), ("wake", "h2d"))]
        print(f"the bytes of ours take {alone[0]:.3f} s out and {alone[1]:.3f} s back on the link alone")
    print("all bars hold" if good else "FAILS")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
