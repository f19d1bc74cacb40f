"""Compares sleeps and wakes: this package's, mcore's, SkyRL's, verl's, NeMo-RL's and torch_memory_saver's, in one run.

    python tests/gpu/peers.py --peers .peers
    python tests/gpu/peers.py --peers CHECKOUT --arms verl --kinds plain --sync

An arm is a process, and has the GPU by itself. The peers' own files are read from a folder, and are no part of this
repository. It is a checkout of one framework, or has several and the wheel:

    .peers/skyrl, .peers/verl, .peers/nemo_rl   checkouts of NovaSky-AI/SkyRL, verl-project/verl, NVIDIA-NeMo/RL, or the
                                                files of them that `peers_arm.FILES` names
    .peers/torch_memory_saver-*.whl             from PyPI

A cycle is a training step, a sleep and a wake. With `--sync` parameters alone wake in between, as for a weight sync,
and sleep again. "left" is what is on the GPU in a sleep. Arms with precision-aware Adam, fp32 accumulation or frozen
parameters run at the same time: of those only bytes and bits are told. Ends with status 1 where an arm of ours failed,
is not bitwise equal to one that never sleeps (on each rank, with `--ranks`), or keeps memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peers_arm import FILES  # puts tests/ on the path

from bridge_fgo.tools.link import launcher

HERE = Path(__file__).parent
ARM = HERE / "peers_arm.py"
ARM_SECONDS = 330
"""Of which imports and the making of the model take most."""

OF_ADAM = ("never", "ours", "mcore", *(f"{by}{ours}" for by in FILES for ours in ("", "+ours")))
PLAIN = (*OF_ADAM, "memory_saver", "memory_saver+retained")
OURS = tuple(by for by in PLAIN if by.endswith("ours"))
"""With "+ours": a peer's own functions after `install(frameworks=...)`."""
VARIANTS = {"precision_aware": "--precision-aware", "fp32_accumulation": "--fp32-accumulation", "frozen": "--frozen"}
"""Options of trainings in which `OF_ADAM` are told apart by bytes and bits."""
LEAST_RETURNED, MOST_DRIFT = 0.98, 0.01
HEAD = [
    "by", "sleep s", "sync s", "wake s", "cycle / ours", "GB out", "GB back", "returned", "drift", "pinned GB",
    "left GB", "bits",
]  # fmt: skip


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


def run_arm(kind: str, name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns what an arm prints last; {"error": ...} where it failed."""
    by, _, how = name.partition("+")
    command = [sys.executable, *launcher(options.ranks), str(ARM), "--by", by, "--peers", str(options.peers)]
    command += ["--with-ours"] * (how == "ours") + ["--sync"] * options.sync
    if kind == "plain":
        command += ["--layers", str(options.layers), "--cycles", str(options.cycles), "--seconds", str(options.seconds)]
    else:
        command += [VARIANTS[kind], "--layers", "2", "--cycles", "3"]
    environment = environment_of(name, options.peers, folder)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ARM_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {ARM_SECONDS} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        print(f"--- {kind}, {name}", *lines[-40:], sep="\n", flush=True)
        return {"error": lines[-1][:300]}
    said = [line for line in done.stdout.splitlines() if line.startswith(("bridge_fgo:", "stand-ins:"))]
    print(f"{kind}, {name}: done", *said, sep="\n  ", flush=True)
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def bits(run: dict[str, Any], never: dict[str, Any]) -> str:
    """Returns whether training went on as if it had never slept."""
    steps = len(run["losses"][0])
    of_never = [
        (losses[:steps], sums[steps - 1]) for losses, sums in zip(never["losses"], never["sums_by_step"], strict=True)
    ]
    equal = [*zip(run["losses"], run["sums"], strict=True)] == of_never
    return "equal" if equal else "differ" if run["moves"] else "DIFFER: weights do not move any more"


def seconds(run: dict[str, Any]) -> list[float]:
    """Returns the median seconds of a sleep, of a wake of parameters (0 where there is none), and of a wake."""
    timed = [cycle for cycle in run["cycles"] if "sleep" in cycle and "wake" in cycle]
    timed = timed[1:] if len(timed) > 1 else timed  # the first takes host memory
    return [statistics.median(cycle.get(move, 0) for cycle in timed) for move in ("sleep", "sync", "wake")]


def gigabytes(nbytes: float) -> str:
    """Returns bytes as text."""
    return f"{nbytes / 1e9:.2f}"


def tell(kind: str, runs: dict[str, dict[str, Any]]) -> bool:
    """Prints the table of the arms of a kind; returns whether all of ours are as they have to be."""
    never, ours = runs["never"], runs["ours"]
    if "error" in never:
        print(f"{kind}, never: {never['error']}")
        return False
    managed = sum(never["managed"].values())
    whole = ", ".join(f"{what} {gigabytes(nbytes)}" for what, nbytes in never["managed"].items())
    print(f"\n{kind}: {never['parameters'] / 1e9:.2f}B parameters, {gigabytes(managed)} GB: {whole}")
    if "link" in ours:
        print(f"link {gigabytes(ours['link']['out'])} GB/s out, {gigabytes(ours['link']['back'])} back")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    good = True
    for by, run in runs.items():
        if by == "never":
            continue
        if "error" in run:
            print(f"| {by} | {run['error']} |")
            good &= by not in OURS
            continue
        cycles = run["cycles"]
        took = seconds(run) if kind == "plain" else []
        cycle = f"{sum(took) / sum(seconds(ours)):.1f}" if took and "error" not in ours else "-"
        counted = [each for each in cycles if each["out"] is not None][-1]
        returned = min(each["after"]["free"] - each["before"]["free"] for each in cycles) / managed
        asleep = [each["after"]["free"] for each in cycles]
        drift = (max(asleep) - min(asleep)) / managed
        left = {what: nbytes for what, nbytes in cycles[-1]["left"].items() if nbytes and run["by"] != "memory_saver"}
        equal = bits(run, never)
        cells = [
            by, *([f"{each:.3f}" for each in took] or ["-", "-", "-"]), cycle,
            gigabytes(counted["out"]), gigabytes(counted["back"]), f"{returned:.3f}", f"{drift:.4f} ({len(cycles)})",
            gigabytes(max(run["pinned"])), ", ".join(f"{what} {gigabytes(left[what])}" for what in left) or "0", equal,
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |")
        if by in OURS:
            good &= equal == "equal" and not left
            has_gpu = cycles[0]["before"]["free"] > 0
            good &= not (has_gpu and kind == "plain") or (
                returned >= LEAST_RETURNED and drift <= MOST_DRIFT and run["pinned"][-1] == run["pinned"][1]
            )
    return good


def names_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Returns what reads names with commas between them, for an option."""

    def read(text: str) -> tuple[str, ...]:
        if unknown := set(text.split(",")) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: use some of {','.join(known)}")
        return tuple(text.split(","))

    return read


def main(arguments: list[str] | None = None) -> int:
    """Runs the arms, and prints; returns the status to exit with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6, help="6: 0.5 billion parameters")
    parser.add_argument("--cycles", type=int, default=20, help="at most")
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="after which an arm begins no cycle from the fourth on"
    )
    peers = tuple(dict.fromkeys(by.partition("+")[0] for by in PLAIN))
    parser.add_argument("--arms", type=names_of(peers), default=peers, help="whose, each with ours and without")
    parser.add_argument("--kinds", type=names_of(("plain", *VARIANTS)), default=("plain", *VARIANTS))
    parser.add_argument("--sync", action="store_true", help="wake the parameters alone in each sleep, and sleep again")
    parser.add_argument("--ranks", type=int, default=1, help="of data parallelism, each with a GPU; told is rank 0's")
    options = parser.parse_args(arguments)
    wanted = [by for by in PLAIN if by.partition("+")[0] in (*options.arms, "never", "ours")]
    kinds = {kind: [by for by in wanted if kind == "plain" or by in OF_ADAM] for kind in options.kinds}
    good = []
    with TemporaryDirectory() as folder:
        for kind, names in kinds.items():
            side_by_side = 1 if kind == "plain" else len(names)  # as many as fit the GPU
            with ThreadPoolExecutor(side_by_side) as pool:
                runs = pool.map(lambda name, kind=kind: run_arm(kind, name, options, Path(folder)), names)
            good.append(tell(kind, dict(zip(names, runs, strict=True))))
    print("all bars hold" if all(good) else "FAILS")
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
