"""What the bench trains, and which arms there are."""

from __future__ import annotations

from dataclasses import dataclass

PRESETS = {
    # 1.64B parameters; 4 microbatches of 2 x 2048 tokens on one GPU, far too short to hide the copies behind.
    "short": "--layers 24 --hidden 2048 --ffn 8192 --heads 16 --seq 2048 --mbs 2",
    # The same model with six times the tokens in a microbatch, in sequences four times as long: its forward takes
    # longer than the states take over the link, and its activations are larger than they.
    "long": "--layers 24 --hidden 2048 --ffn 8192 --heads 16 --seq 8192 --mbs 3 --recompute attention",
    # A mixture of experts: a ChainedOptimizer of dense and expert parameters, experts over all GPUs.
    "moe": "--layers 12 --hidden 1024 --ffn 4096 --heads 16 --seq 2048 --mbs 2 --experts 16 --topk 2",
    # As many states as the first in narrower layers, each tensor's updated on its own: more than 400 slabs.
    "slabs": "--layers 51 --hidden 1408 --ffn 5632 --heads 16 --seq 2048 --mbs 2",
    # 5.93B parameters, of which states and activations together need 148 GB: more than an H200 has.
    "tight": "--layers 32 --hidden 4096 --ffn 11008 --heads 32 --groups 8 --seq 2048 --mbs 2",
}
MICROBATCHES = {"short": 4, "long": 2, "moe": 4, "slabs": 4, "tight": 16}
RESIDENT = {"tight": ("--recompute", "attention")}
"""What the resident arm needs to fit, where it does not fit as it is."""
RECOMPUTED = ("--recompute", "full", "--mbs", "4")
"""What fits without offload wherever anything does, in microbatches as large as the memory that it saves allows."""
SLAB_MIB = {"slabs": 4}
"""Size of a slab of this package's engine, in MiB; where there is none, the default."""
NAMES = ("resident", "recomputed", "native", "whole", "half", "auto", "mcore", "hybrid")


@dataclass(frozen=True)
class BenchArm:
    """One arm. options: of `bridge_fgo.harness.gpu`; python_path: comes first in PYTHONPATH."""

    name: str
    options: tuple[str, ...]
    python_path: str = ""
    bitwise: bool = True
    """Whether it has to be bitwise equal to the resident arm: Adam on the CPU rounds otherwise, and so do microbatches
    of another size."""
    half: bool = False
    """Whether it gets a budget that asks for half of the saving, from the resident arm's peak."""
    saves: bool = True
    """Whether it can save in the background: with mcore's offloaders that is refused."""


def size_options(preset: str, gpus: int) -> list[str]:
    """Return the arm's options for the sizes of a preset on `gpus` data-parallel ranks."""
    options = PRESETS[preset].split()
    # Jobs train without that mode. Dense arms were bitwise equal without it on H200, as their loss is not fused; a
    # mixture of experts adds up what its experts return in any order.
    options += ["--deterministic" if preset == "moe" else "--no-deterministic"]
    microbatch = int(options[options.index("--mbs") + 1])
    options += ["--gbs", str(microbatch * MICROBATCHES[preset] * gpus)]
    if preset == "moe":
        options += ["--ep", str(gpus)]
    return options


def save_options(steps: int, folder: str) -> list[str]:
    """Return the arm's options for two background saves into `folder`, the second in the steps that count."""
    return ["--save", folder, "--save-interval", str(steps // 2), "--async-save", "--finish-saves"]


def arms(names: list[str], megatron_lm: list[str], preset: str) -> list[BenchArm]:
    """Return the arms of the given names, in that order.

    Args:
        names: of `NAMES`.
        megatron_lm: checkouts of Megatron-LM's `dev` branch; each gives an `mcore` arm of its own. With none the
            installed mcore is taken.
        preset: of `PRESETS`.

    Raises:
        ValueError: a name is unknown, or the resident arm, which all others are compared with, is not the first.
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names or names[0] != "resident":
        raise ValueError(f"--arms {','.join(names)}: use resident first, then any of {', '.join(NAMES[1:])}")
    native = ("--offload", "on", "--engine", "native")
    if preset in SLAB_MIB:
        native += ("--slab-mib", str(SLAB_MIB[preset]))
    found: list[BenchArm] = []
    for name in names:
        if name == "resident":
            found.append(BenchArm(name, ("--offload", "off", *RESIDENT.get(preset, ()))))
        elif name == "recomputed":
            found.append(BenchArm(name, ("--offload", "off", *RECOMPUTED), bitwise=False))
        elif name == "native":
            found.append(BenchArm(name, native))
        elif name == "whole":
            found.append(BenchArm(name, (*native, "--master-remainders", "never")))
        elif name == "half":
            found.append(BenchArm(name, native, half=True))
        elif name == "auto":
            found.append(BenchArm(name, (*native, "--budget-gib", "auto")))
        elif name == "hybrid":
            found.append(BenchArm(name, ("--hybrid",), bitwise=False))
        else:
            upstream = ("--offload", "on", "--engine", "mcore")
            paths = megatron_lm or [""]
            found += [
                BenchArm(f"mcore{i or ''}", upstream, python_path=path, saves=False) for i, path in enumerate(paths)
            ]
    return found
