"""Runs upstream's own tests twice, without this package and with it installed, and compares each test's outcome.

    python tests/upstream/suite.py CHECKOUT [RANKS [PATH ...]]

CHECKOUT: of Megatron-Bridge (its `tests/unit_tests/training` is run, against the Bridge that is installed), or of
Megatron-LM (its tests of optimizers with states and of Megatron-FSDP, `MCORE`, against the checkout's mcore, on so many
RANKS; without GPUs CUDA stands in, and what needs the real one fails both times). PATH: tests to run in their place,
from the checkout. Exit status 1 where an outcome differs, 2 where there is nothing to run.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

PLUGINS = Path(__file__).parent
MCORE = (
    "test_optimizer_state_offloading.py", "test_emerging_optimizers.py", "test_layer_wise_optimizer.py",
    "dist_checkpointing/test_layer_wise_optimizer.py", "dist_checkpointing/test_optimizer.py", "distributed/mfsdp_v1",
    "transformer/test_fsdp_dtensor_checkpoint.py", "a2a_overlap/test_fsdp_1f1b_overlap.py",
)  # fmt: skip
"""Tests of mcore, in `tests/unit_tests`; the first are of generation 1 of its own offloader."""


def what_to_run(checkout: Path) -> list[str]:
    """Return the tests, as paths from the checkout."""
    folder = Path("tests/unit_tests")
    if (checkout / folder / "training").is_dir() and not (checkout / "megatron/core").is_dir():
        return [str(folder / "training")]
    return [str(folder / name) for name in MCORE if (checkout / folder / name).exists()]


def outcomes(checkout: Path, tests: list[str], installed: bool, ranks: int) -> dict[str, str]:
    """Run the tests; return the outcome of each by its name, and by its rank where there are several."""
    project = PLUGINS.parents[1]
    # The checkout first: for Megatron-LM's mcore, and Bridge's `scripts` (Bridge itself is in `src`).
    path = [str(checkout), str(PLUGINS), str(project), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "BRIDGE_FGO_INSTALL": str(int(installed)), "PYTHONPATH": os.pathsep.join(path)}
    environment.setdefault("NVIDIA_PYTORCH_VERSION", "26.07")  # without it mcore skips its tests of Muon
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        pytest = ["-m", "pytest", "-p", "upstream_plugin", "-q", "--tb=no", "-p", "no:cacheprovider", "-W", "ignore"]
        command = [
            sys.executable, *launcher, *pytest, "--continue-on-collection-errors", f"--junitxml={report}", *tests,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=checkout, env=environment, check=False, capture_output=True, text=True)
        reports = [report.with_name(f"{rank}.{report.name}") for rank in range(ranks)] if ranks > 1 else [report]
        if not all(one.exists() for one in reports):
            sys.exit(
                f"pytest left no report (exit status {done.returncode}):\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return {
            f"{case.get('classname')}::{case.get('name')}{f' of rank {rank}' if ranks > 1 else ''}": outcome(case)
            for rank, one in enumerate(reports)
            for case in ElementTree.parse(one).iter("testcase")
        }


def outcome(case: ElementTree.Element) -> str:
    """Return what became of a test."""
    for kind in ("failure", "error", "skipped"):
        if case.find(kind) is not None:
            return {"failure": "failed"}.get(kind, kind)
    return "passed"


def main() -> int:
    """Run and compare; see the module."""
    checkout, ranks = Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    tests = sys.argv[3:] or what_to_run(checkout)
    if not tests:
        print(f"{checkout} has neither Bridge's tests/unit_tests/training nor mcore's {', '.join(MCORE)}")
        return 2
    results = {installed: outcomes(checkout, tests, installed, ranks) for installed in (False, True)}
    for installed, found in results.items():
        counts = ", ".join(f"{number} {name}" for name, number in sorted(Counter(found.values()).items()))
        print(f"{'with' if installed else 'without'} bridge_fgo: {counts or 'no tests'}")
    names = results[False].keys() | results[True].keys()
    different = sorted(name for name in names if results[False].get(name) != results[True].get(name))
    for name in different:
        print(f"{name}: {results[False].get(name)} without, {results[True].get(name)} with")
    return 1 if different or not names else 0


if __name__ == "__main__":
    sys.exit(main())
