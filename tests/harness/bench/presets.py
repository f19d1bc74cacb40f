"""What the bench trains, and which arms there are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

DENSE = "--layers 24 --hidden 2048 --ffn 8192 --heads 16"  # 1.64B parameters
EXPERTS = "--layers 12 --hidden 1024 --ffn 4096 --heads 16 --experts 16 --topk 2"  # experts over all GPUs

PRESETS = {
    # A job as recipes have it, by the tokens of a microbatch.
    "4k": f"{DENSE} --seq 4096 --mbs 1 --recompute attention",
    "8k": f"{DENSE} --seq 8192 --mbs 1 --recompute attention",
    "moe-4k": f"{EXPERTS} --seq 4096 --mbs 1 --recompute attention",
    "moe-8k": f"{EXPERTS} --seq 8192 --mbs 1 --recompute attention",
    # 1.64B parameters; 4 microbatches of 2 x 2048 tokens on one GPU, far too short to hide the copies behind.
    "short": f"{DENSE} --seq 2048 --mbs 2",
    # The same model with six times the tokens in a microbatch, in sequences four times as long: its forward takes
    # longer than the states take over the link, and its activations are larger than they.
    "long": f"{DENSE} --seq 8192 --mbs 3 --recompute attention",
    # A mixture of experts: a ChainedOptimizer of dense and expert parameters.
    "moe": f"{EXPERTS} --seq 2048 --mbs 2",
    # As many states as the first in narrower layers, each tensor's updated on its own: more than 400 slabs.
    "slabs": "--layers 51 --hidden 1408 --ffn 5632 --heads 16 --seq 2048 --mbs 2",
    # 5.93B parameters, of which states and activations together need 148 GB: more than an H200 has.
    "tight": "--layers 32 --hidden 4096 --ffn 11008 --heads 32 --groups 8 --seq 2048 --mbs 2",
}
MICROBATCHES = {"long": 2, "tight": 16}  # of a step; of other presets 4
RESIDENT = {"tight": ("--recompute", "attention")}  # to make the resident arm of a preset fit the GPU
RECOMPUTED = ("--recompute", "full", "--mbs", "4")
"""Options of the arm that recomputes every layer. That saves the most memory without offload, which larger microbatches
then use."""
SLAB_BYTES = {"slabs": 4 * 2**20}  # of this package's engine, by preset; elsewhere the default
NAMES = (
    *("resident", "recomputed", "native", "packed", "half", "auto", "lazy", "gradients", "auto_gradients"),
    *("loop", "survive", "mcore", "fsdp_resident", "fsdp", "hybrid"),
)
"""Kinds of arms."""


@dataclass(frozen=True)
class BenchArm:
    """One arm."""

    name: str  # with variables of its own it is `native:CUDA_DEVICE_MAX_CONNECTIONS=1`
    options: tuple[str, ...]  # of `harness.arms.gpu`
    python_path: str = ""  # comes first in PYTHONPATH
    bitwise: bool = True
    """Whether it has to be bitwise equal to the resident arm: Adam on the CPU rounds otherwise, and so do microbatches
    of another size."""
    environment: Mapping[str, str] = field(default_factory=dict)  # that set it apart from another arm of its kind

    @property
    def kind(self) -> str:
        """One of `NAMES`."""
        return self.name.partition(":")[0]

    @property
    def is_resident(self) -> bool:
        """Whether others are compared with it: those of Megatron-FSDP have a resident one of their own."""
        return self.kind in ("resident", "fsdp_resident")

    @property
    def is_fsdp(self) -> bool:
        """Whether Megatron-FSDP shards its model."""
        return self.kind.startswith("fsdp")

    @property
    def saves(self) -> bool:
        """Whether it can save in the background: Megatron-FSDP cannot, and with mcore's offloaders it is refused."""
        return not self.kind.startswith(("fsdp", "mcore"))


def size_options(preset: str, gpus: int, microbatches: int | None = None, layers: int | None = None) -> list[str]:
    """Return the arm's options for the sizes of a preset; what is given replaces what the preset has."""
    options = PRESETS[preset].split()
    if layers is not None:
        options[options.index("--layers") + 1] = str(layers)
    # Jobs train without that mode. Dense arms were bitwise equal without it on H200, as their loss is not fused; a
    # mixture of experts adds up what its experts return in any order.
    options += ["--deterministic" if "--experts" in options else "--no-deterministic"]
    microbatch = int(options[options.index("--mbs") + 1])
    options += ["--gbs", str(microbatch * (microbatches or MICROBATCHES.get(preset, 4)) * gpus)]
    if "--experts" in options:
        options += ["--ep", str(gpus)]
    return options


def save_options(steps: int, folder: str) -> list[str]:
    """Return the arm's options for two background saves into `folder`, the second in the steps that count."""
    return ["--save", folder, "--save-interval", str(steps // 2), "--async-save", "--finish-saves"]


def read_name(text: str) -> tuple[str, dict[str, str]]:
    """Return the kind of an arm and its variables: of `native:A=1:B=2`, "native" and {"A": "1", "B": "2"}."""
    kind, *variables = re.split(r":(?=[A-Za-z_]\w*=)", text)
    return kind, dict(variable.split("=", 1) for variable in variables)


def resident_of(arm: BenchArm, among: list[BenchArm]) -> BenchArm:
    """Return the resident arm (Megatron-FSDP's own) with the variables of `arm`; the first where there is none."""
    residents = [other for other in among if other.is_resident and other.is_fsdp is arm.is_fsdp]
    return next((other for other in residents if other.environment == arm.environment), residents[0])


def arms(
    names: list[str], megatron_lm: str | None, preset: str, optimizer: str = "adam", fsdp: str | None = None
) -> list[BenchArm]:
    """Return the arms of the given names, each of `NAMES` and its variables (`native:A=1:B=2`), in that order.

    The `mcore` arm trains on the checkout of Megatron-LM's `dev` branch in `megatron_lm`, or on the installed mcore.
    `optimizer` is of every arm but `hybrid`, `fsdp`, what to shard, of the arms with Megatron-FSDP.

    Raises:
        ValueError: a name is unknown or given twice, or the resident arm, which all others are compared with, is not
            the first; or the checkout is not whole; or an arm cannot train with the optimizer.
    """
    read = [read_name(name) for name in names]
    kinds = {kind for kind, _ in read}
    if names[0] != "resident" or len(set(names)) < len(names) or not kinds.issubset(NAMES):
        raise ValueError(f"--arms {','.join(names)}: use resident first, then any of {', '.join(NAMES[1:])} once")
    of_fsdp = {"fsdp_resident", "fsdp"}
    if kinds & of_fsdp != (set() if fsdp is None else of_fsdp) or (fsdp is not None and optimizer != "adam"):
        raise ValueError(
            f"--fsdp {fsdp} with --arms {','.join(names)} and --optimizer {optimizer}: --fsdp goes with both "
            "fsdp_resident and fsdp, which is compared with it, and with Adam"
        )
    if optimizer != "adam" and "hybrid" in kinds:
        raise ValueError(f"--optimizer {optimizer} with the hybrid arm: HybridDeviceOptimizer is Adam; leave it out")
    # Bridge imports `megatron.training` too, and that of the wheel does not go with the checkout's `megatron.core`.
    for part in ("core", "training") if megatron_lm is not None else ():
        if not Path(megatron_lm or "", "megatron", part, "__init__.py").exists():
            raise ValueError(
                f"--megatron-lm {megatron_lm}: there is no megatron/{part} in it; give the top of a checkout of "
                "Megatron-LM's dev branch with its whole `megatron` folder"
            )
    options = _options_of_kinds(preset, optimizer, fsdp)
    found: list[BenchArm] = []
    for name, (kind, environment) in zip(names, read, strict=True):
        # A layer-wise Muon has its parameters in other optimizers than the resident arm: digests of other lists.
        bitwise = kind not in ("recomputed", "hybrid") and (kind != "mcore" or optimizer == "adam")
        path = (megatron_lm or "") if kind == "mcore" else ""
        found.append(BenchArm(name, options[kind], path, bitwise, environment))
    return found


def _options_of_kinds(preset: str, optimizer: str, fsdp: str | None) -> dict[str, tuple[str, ...]]:
    muon = () if optimizer == "adam" else ("--no-distributed", "--optimizer", optimizer)
    resident = (*muon, "--offload", "off", *RESIDENT.get(preset, ()))
    engine = ("--engine", "native", *(("--slab-bytes", str(SLAB_BYTES[preset])) if preset in SLAB_BYTES else ()))
    native = (*muon, "--offload", "on", *engine)
    mcore = ("--offload", "on", "--engine", "mcore")
    return {
        "resident": resident,
        "recomputed": (*muon, "--offload", "off", *RECOMPUTED),
        "native": native,
        "packed": (*native, "--master-remainders"),
        "half": native,
        "auto": (*native, "--gpu-memory-budget-gib", "auto"),
        "lazy": (*native, "--gradients", "lazy"),
        "gradients": (*native, "--gradients", "true"),
        "auto_gradients": (*native, "--gradients", "true", "--gpu-memory-budget-gib", "auto"),
        "survive": (*native, "--survive-crash"),
        "loop": (*muon, "--offload", "off", "--own-loop", *engine),
        "mcore": ("--optimizer", "muon", "--layer-wise", "--offload", "on", "--no-install") if muon else mcore,
        "fsdp_resident": ("--fsdp", str(fsdp), *resident),
        "fsdp": ("--fsdp", str(fsdp), *native),
        "hybrid": ("--hybrid",),
    }
