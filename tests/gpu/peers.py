"""Compares sleeps and wakes: this package's, mcore's, SkyRL's, verl's, NeMo-RL's and torch_memory_saver's, in one run.

    python tests/gpu/peers.py --peers .peers

An arm is a process, and has the GPU by itself. The peers' own functions are read
from a folder, and are no part of this repository:

    .peers/skyrl/megatron_utils.py             skyrl/backends/skyrl_train/distributed/megatron/ of NovaSky-AI/SkyRL
    .peers/verl/megatron_utils.py              verl/utils/ of verl-project/verl
    .peers/nemo_rl/megatron_policy_worker.py   nemo_rl/models/policy/workers/ of NVIDIA-NeMo/RL
    .peers/torch_memory_saver-*.whl            from PyPI

A cycle is a training step, a sleep and a wake. "left" is what is on the GPU in a sleep. Of arms with
precision-aware Adam or fp32 accumulation only bytes and bits are told: they run at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ARM = HERE / "peers_arm.py"
ARM_SECONDS = 330
"""Of which imports and the making of the model take most."""

OF_ADAM = ("never", "ours", "mcore+ours", "mcore", "skyrl", "verl", "nemo_rl")
PLAIN = (*OF_ADAM, "memory_saver", "memory_saver+retained", "skyrl+ours", "verl+ours", "nemo_rl+ours")
VARIANTS = {"precision_aware": "--precision-aware", "fp32_accumulation": "--fp32-accumulation"}
"""Options of trainings in which `OF_ADAM` are told apart by bytes and bits."""
OURS = tuple(by for by in PLAIN if by.endswith("ours"))
"""With "+ours": a peer's functions with the lines changed that `bridge_fgo/sleep/PEERS.md` names."""
FIVE_TIMES = ("mcore", "nemo_rl", "memory_saver")
"""Those whose cycle takes at least five times as long as ours; the others' only longer."""
LEAST_RETURNED, MOST_DRIFT = 0.98, 0.01


class Name(NamedTuple):
    """An arm: what it trains, and by what it sleeps."""

    kind: str
    by: str


def environment_of(by: str, peers: Path, folder: Path) -> dict[str, str]:
    """Returns the environment of an arm."""
    found = dict(os.environ)
    path = [str(HERE.parents[1]), found.get("PYTHONPATH", "")]
    if by.startswith("memory_saver"):
        import torch

        (wheel,) = peers.glob("torch_memory_saver-*.whl")
        unpacked = folder / "torch_memory_saver"
        if not unpacked.exists():
            zipfile.ZipFile(wheel).extractall(unpacked)
        major = (torch.version.cuda or "12").split(".")[0]
        found["LD_PRELOAD"] = str(unpacked / f"torch_memory_saver_hook_mode_preload_cu{major}.abi3.so")
        found |= {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            found.pop(name, None)  # expandable segments it refuses
        if by.endswith("+retained"):
            found["TMS_RETAIN_CPU_BACKUP"] = "1"
        path.insert(0, str(unpacked))
    found["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return found


def run_arm(name: Name, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns what an arm prints last; {"error": ...} where it failed."""
    by, _, how = name.by.partition("+")
    command = [sys.executable, str(ARM), "--by", by, "--peers", str(options.peers)]
    command += ["--with-ours"] * (how == "ours")
    if name.kind == "plain":
        command += ["--layers", str(options.layers), "--cycles", str(options.cycles), "--seconds", str(options.seconds)]
    else:
        command += [VARIANTS[name.kind], "--layers", "2", "--cycles", "3"]
    environment = environment_of(name.by, options.peers, folder)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ARM_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {ARM_SECONDS} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": (lines or [f"status {done.returncode}"])[-1][:300], "log": "\n".join(lines[-40:])}
    return json.loads(done.stdout.splitlines()[-1])


def bits(run: dict[str, Any], never: dict[str, Any]) -> str:
    """Returns whether training went on as if it had never slept."""
    steps = len(run["losses"])
    equal = run["losses"] == never["losses"][:steps] and run["sums"] == never["sums_by_step"][steps - 1]
    return "equal" if equal else "differ" if run["moves"] else "DIFFER: weights do not move any more"


def figures(run: dict[str, Any], never: dict[str, Any]) -> dict[str, Any]:
    """Returns what the table tells of an arm."""
    timed = [cycle for cycle in run["cycles"] if "sleep" in cycle and "wake" in cycle]
    timed = timed[1:] if len(timed) > 1 else timed  # the first takes host memory
    managed = sum(run["managed"].values())
    counted = [cycle for cycle in run["cycles"] if cycle["out"] is not None]
    asleep = [cycle["after"]["free"] for cycle in run["cycles"]]
    returned = [cycle["after"]["free"] - cycle["before"]["free"] for cycle in run["cycles"]]
    left = run["cycles"][-1]["left"]
    return {
        "cycles": len(run["cycles"]),
        "sleep": statistics.median(cycle["sleep"] for cycle in timed),
        "wake": statistics.median(cycle["wake"] for cycle in timed),
        "out": counted[-1]["out"],
        "back": counted[-1]["back"],
        "returned": min(returned) / managed,
        "drift": (max(asleep) - min(asleep)) / managed,
        "pinned": max(run["pinned"]),
        "pinned_later": run["pinned"][-1] - run["pinned"][1],
        "left": {kind: nbytes for kind, nbytes in left.items() if nbytes} if run["by"] != "memory_saver" else {},
        "bits": bits(run, never),
    }


def gigabytes(nbytes: float) -> str:
    """Returns bytes as text."""
    return f"{nbytes / 1e9:.2f}"


def table(found: dict[str, Any]) -> list[str]:
    """Returns the lines of the table of the arms that were timed."""
    lines = [
        "| by | sleep s | wake s | cycle / ours | GB out | GB back | returned | drift | pinned GB | left GB | bits |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    ours = found["ours"]["sleep"] + found["ours"]["wake"] if "sleep" in found["ours"] else float("nan")
    for by, f in found.items():
        if "error" in f:
            lines.append(f"| {by} | {f['error']} |")
            continue
        left = ", ".join(f"{kind} {gigabytes(nbytes)}" for kind, nbytes in f["left"].items()) or "0"
        cells = [
            by, f"{f['sleep']:.3f}", f"{f['wake']:.3f}", f"{(f['sleep'] + f['wake']) / ours:.1f}", gigabytes(f["out"]),
            gigabytes(f["back"]), f"{f['returned']:.3f}", f"{f['drift']:.4f} ({f['cycles']})", gigabytes(f["pinned"]),
            left, f["bits"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def failures(found: dict[str, Any]) -> list[str]:
    """Returns what of ours is not as it has to be."""
    if bad := [by for by in OURS if "error" in found[by]]:
        return [f"{by}: {found[by]['error']}" for by in bad]
    failed = []
    for by in OURS:
        f = found[by]
        failed += [f"{by}: bits {f['bits']}"] * (f["bits"] != "equal")
        failed += [f"{by}: {f['returned']:.3f} returned"] * (f["returned"] < LEAST_RETURNED)
        failed += [f"{by}: drift {f['drift']:.3f}"] * (f["drift"] > MOST_DRIFT)
        failed += [f"{by}: {f['pinned_later']} bytes pinned after the first cycle"] * bool(f["pinned_later"])
    ours = found["ours"]["sleep"] + found["ours"]["wake"]
    for by, f in found.items():
        least = 5 if by in FIVE_TIMES else 1
        if by not in OURS and "sleep" in f and f["sleep"] + f["wake"] < least * ours:
            failed.append(f"{by}'s cycle takes {(f['sleep'] + f['wake']) / ours:.1f} times ours, not {least}")
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Runs the arms, and prints; returns the status to exit with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6, help="6: 0.5 billion parameters")
    parser.add_argument("--cycles", type=int, default=20, help="at most")
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="after which an arm begins no cycle from the fourth on"
    )
    parser.add_argument("--json", type=Path, help="file for every figure")
    parser.add_argument("--arms", type=lambda text: text.split(","), default=PLAIN, help=f"of {','.join(PLAIN)}")
    parser.add_argument("--no-variants", action="store_true")
    options = parser.parse_args(arguments)
    names = [Name("plain", by) for by in PLAIN if by in (*options.arms, "never", *OURS)]
    runs: dict[Name, dict[str, Any]] = {}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in names:
            runs[name] = run_arm(name, options, folder)
            print(f"{name.by}: {runs[name].get('error', 'done')}", flush=True)
        for kind in () if options.no_variants else VARIANTS:
            of_kind = [Name(kind, by) for by in OF_ADAM]  # as many as fit the GPU side by side
            with ThreadPoolExecutor(len(of_kind)) as pool:
                runs |= zip(of_kind, pool.map(lambda name: run_arm(name, options, folder), of_kind), strict=True)
    for name, run in runs.items():
        if "log" in run:
            print(f"--- {name.kind}, {name.by}\n{run['log']}")
    if options.json is not None:
        options.json.write_text(json.dumps({f"{name.kind}/{name.by}": run for name, run in runs.items()}))
    return tell(runs)


def tell(runs: dict[Name, dict[str, Any]]) -> int:
    """Prints the tables, and returns the status to exit with."""
    never = runs[Name("plain", "never")]
    if "error" in never:
        print(f"never: {never['error']}")
        return 1
    found = {
        name.by: run if "error" in run else figures(run, never)
        for name, run in runs.items()
        if name.kind == "plain" and name.by != "never"
    }
    link = runs[Name("plain", "ours")].get("link")
    managed = sum(never["managed"].values())
    print(
        f"\n{never['parameters'] / 1e9:.2f}B parameters, {gigabytes(managed)} GB of params, grads, masters and moments"
    )
    if link:
        print(f"link {gigabytes(link['out'])} GB/s out, {gigabytes(link['back'])} back")
    print("\n".join(table(found)))
    failed = failures(found)
    for kind in VARIANTS:
        for name in [name for name in runs if name.kind == kind and name.by != "never"]:
            run, resident = runs[name], runs[Name(kind, "never")]
            if error := run.get("error", resident.get("error")):
                print(f"{kind}, {name.by}: {error}")
                failed += [f"{kind}, {name.by}: {error}"] * (name.by in OURS)
                continue
            left = {what: f"{nbytes / 1e9:.3f}" for what, nbytes in run["cycles"][-1]["left"].items() if nbytes}
            whole = ", ".join(f"{what} {nbytes / 1e9:.3f}" for what, nbytes in run["managed"].items())
            equal = bits(run, resident)
            print(f"{kind}, {name.by}: bits {equal}; GB left {left or 0} of {whole}")
            if name.by in OURS and (equal != "equal" or (left and name.by == "ours")):
                failed.append(f"{kind}, {name.by}")
    print("\n".join(failed) if failed else "all bars hold")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
