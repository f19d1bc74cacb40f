"""Runs upstream's own tests twice, without this package and with it installed, and compares each test's outcome.

    python tests/upstream/suite.py CHECKOUT

CHECKOUT: of Megatron-Bridge (its `tests/unit_tests/training` is run, against the Bridge that is installed), or of
Megatron-LM (its `test_optimizer_state_offloading.py`, against the checkout's mcore; it needs a GPU). Exit status 1
where an outcome differs, 2 where there is nothing to run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

PLUGINS = Path(__file__).parent


def what_to_run(checkout: Path) -> Path | None:
    """Return the tests."""
    bridge = checkout / "tests" / "unit_tests" / "training"
    if bridge.is_dir():
        return bridge
    return next(iter(sorted(checkout.glob("tests/**/test_optimizer_state_offloading.py"))), None)


def outcomes(checkout: Path, tests: Path, installed: bool) -> dict[str, str]:
    """Run the tests; return the outcome of each by its name."""
    project = PLUGINS.parents[1]
    # The checkout first: for Megatron-LM's mcore, and Bridge's `scripts` (Bridge itself is in `src`).
    path = [str(checkout), str(PLUGINS), str(project), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "BRIDGE_FGO_INSTALL": str(int(installed)), "PYTHONPATH": os.pathsep.join(path)}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "upstream_plugin", "-q", "--tb=no", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors"]
        command += ["-W", "ignore", f"--junitxml={report}", str(tests.relative_to(checkout))]
        done = subprocess.run(command, cwd=checkout, env=environment, check=False, capture_output=True, text=True)
        if not report.exists():
            sys.exit(
                f"pytest left no report (exit status {done.returncode}):\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        cases = ElementTree.parse(report).iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": outcome(case) for case in cases}


def outcome(case: ElementTree.Element) -> str:
    """Return what became of a test."""
    for kind in ("failure", "error", "skipped"):
        if case.find(kind) is not None:
            return {"failure": "failed"}.get(kind, kind)
    return "passed"


def main() -> int:
    """Run and compare; see the module."""
    checkout = Path(sys.argv[1]).resolve()
    tests = what_to_run(checkout)
    if tests is None:
        print(
            f"{checkout} has neither Bridge's tests/unit_tests/training nor mcore's test_optimizer_state_offloading.py"
        )
        return 2
    results = {installed: outcomes(checkout, tests, installed) for installed in (False, True)}
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
