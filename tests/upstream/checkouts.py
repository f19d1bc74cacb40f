"""Runs the CPU lane on checkouts of Megatron-Bridge and Megatron-LM, and lists which bindings no longer fit.

    python tests/upstream/checkouts.py BRIDGE MEGATRON_LM [ARGUMENTS OF PYTEST]

BRIDGE, MEGATRON_LM: the checkouts; the packages that are installed do not take part. Without arguments the tests of
wiring, parity, checkpoints, loop and resume are run, of optimizers of each kind (Float16, Megatron-FSDP), of engines,
of sleep, and of configs as they are built; slow ones are among them. Exit status 1 where a binding does not fit or a
test fails, 2 where a checkout is none.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]

TESTS = [
    "tests/bridge", "tests/engines", "tests/states", "tests/sleep", "tests/tools/test_job_builder.py",
    "tests/test_own_steps.py", "tests/test_construction.py", "tests/test_parity.py", "tests/test_checkpoints.py",
    "tests/test_two_ranks.py", "tests/test_loop.py",
]  # fmt: skip

BINDINGS = """
import importlib
import json

from bridge_fgo.tools.standins.cuda import install_standins
from bridge_fgo.bridge.table import patches

install_standins()
import megatron.bridge
import megatron.core

misfits, table = {}, []
for patch in patches():
    if not patch.module.startswith("megatron."):
        continue  # of Transformer Engine or Apex
    table.append(patch)
    try:
        patch.check(importlib.import_module(patch.module))
    except (ImportError, RuntimeError) as error:
        misfits[patch.name] = str(error)
found = {package.__name__: [package.package_info.__version__, package.__file__]
         for package in (megatron.bridge, megatron.core)}
print(json.dumps({"count": len(table), "misfits": misfits, "found": found}))
"""


def environment_of(bridge: Path, megatron_lm: Path) -> dict[str, str]:
    """Return an environment in which the checkouts' packages are imported."""
    path = [str(bridge / "src"), str(megatron_lm), str(PROJECT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def bindings(environment: dict[str, str]) -> dict:
    """Return how many bindings the table has, why each that does not fit does not, and what was imported."""
    command = [sys.executable, "-W", "ignore", "-c", BINDINGS]
    done = subprocess.run(command, cwd=PROJECT, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the bindings could not be looked at (exit status {done.returncode}):\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """List the bindings, then run the tests; see the module."""
    if len(sys.argv) < 3:
        print(__doc__)
        return 2
    bridge, megatron_lm = (Path(name).resolve() for name in sys.argv[1:3])
    for checkout, package in ((bridge / "src", "bridge"), (megatron_lm, "core")):
        if not (checkout / "megatron" / package / "package_info.py").exists():
            print(f"{checkout} has no megatron/{package}: give a checkout of Megatron-Bridge, then one of Megatron-LM")
            return 2
    environment = environment_of(bridge, megatron_lm)
    looked_at = bindings(environment)
    for package, (version, file) in looked_at["found"].items():
        print(f"{package} {version} ({file})")
        if not Path(file).is_relative_to(bridge if package == "megatron.bridge" else megatron_lm):
            sys.exit(f"{package} was imported from {file}, not from the checkout")
    misfits = looked_at["misfits"]
    print(f"{looked_at['count'] - len(misfits)} of {looked_at['count']} bindings fit", flush=True)
    for name, why in misfits.items():
        print(f"  {name}: {why}", flush=True)
    arguments = sys.argv[3:] or ["-n", "2", "--dist", "loadfile", "-m", "not gpu", "-q", *TESTS]
    tests = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=PROJECT, env=environment, check=False)
    return 1 if misfits or tests.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
