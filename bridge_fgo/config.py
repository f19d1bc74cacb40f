"""The settings of the offload, declared once: one small frozen dataclass, checked when it is made.

The command lines, NeMo-Run's settings and `optimizer.offload` of Bridge's config take their names from its fields, and
the command lines their help from the first sentence of the docstrings (`bridge_fgo.options`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

MIB = 2**20

Engine = Literal["auto", "native", "mcore"]


def without_measure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that mean something only where the offload is on: all but `measure`."""
    return {name: value for name, value in settings.items() if name != "measure"}


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Settings of the offload, given to `bridge_fgo.install` or, by the same names, in `cfg.optimizer.offload`.

    The offload itself is turned on per run, by `cfg.optimizer.offload_optimizer_states = True`.

    Raises:
        ValueError: a setting is of the wrong type or out of range; the message names it.
    """

    engine: Engine = "auto"
    """Which offloader moves the bytes. "native" is this package's engine, on every mcore. "mcore" is the offloader of
    the installed mcore, refused where that mcore has none. "auto" is native, or mcore's chunked offloader where its own
    fraction or chunk size is set. On GPUs native was faster in all but one of the runs of both, gives reserved memory
    back and saves in the background."""

    moments: bool = True
    """Offload Adam's `exp_avg` and `exp_avg_sq`."""

    master_weights: bool = True
    """Offload the fp32 master weights, or their 16-bit remainders."""

    master_remainders: bool | None = None
    """Copy always, or never, only the bits of an fp32 master that its bf16 weight lacks; by default once training waits
    for copies. True starts at the first step, False never does. None starts once training has waited for copies in two
    of the first dozen or so steps: where all hide behind a long forward and backward, packing only costs time (on an
    H200 10 ms for 1.64 billion parameters). 17 bits are copied; the weight, which the master was rounded to, stays on
    the GPU, and only the optimizer or a checkpoint load may change it. With None the weights are watched over four
    steps before: where something else changes them, masters are copied whole for good, and a line says so. If you begin
    to modify bf16 weights between later steps, set `master_remainders=False`: once masters are copied in part, their
    next use after such a change raises an error, as it does with True from the first step on."""

    fraction: float = 1.0
    """Share of the bytes of moments and master weights to offload, in (0, 1]. Parameters are taken whole, in the
    optimizer's order, until the share of what `moments` and `master_weights` ask for is reached."""

    gpu_memory_budget_gib: float | Literal["auto"] | None = None
    """Peak of GPU memory to stay under, in GiB, while offloading as little as possible. The peak is of the memory that
    PyTorch allocates on a rank; the CUDA context and NCCL come on top. The first steps offload everything and
    measure. "auto" is what the GPU has, or PyTorch may have of it (`torch.cuda.set_per_process_memory_fraction`, from
    PyTorch 2.8 on), less what is not PyTorch's and a margin for holes between blocks, which grows where PyTorch's
    allocator turns out to need it. Nothing leaves where everything fits."""

    slab_bytes: int = 1024 * MIB
    """Most optimizer state that is updated in one go, in bytes. Where that is less, the geometric mean of the
    optimizer's state and 8 MiB is taken, which costs the least time (0.4 of 20 GB), or a 16th of the state. Each such
    part has a slab for its masters and one for its moments, with one GPU allocation and one host buffer each. A tensor
    is never split, so a larger tensor makes a larger slab. Parts smaller than that mean leave and return in groups of
    its size, where the optimizer step has room for eight of them, which saves host time."""

    piece_bytes: int = 64 * MIB
    """Largest single copy between host and GPU, in bytes. A copy of the training loop's own waits for at most one, 1.2
    ms on an H200; larger ones cost the host less time."""

    pin_memory: bool = True
    """Page-lock the host buffers. Without it a copy cannot overlap computation."""

    measure: bool = False
    """Log the peaks of GPU memory of a run without the offload too, to compare it with one. That is all it does: a run
    that sets `optimizer.offload_optimizer_states` logs them anyway."""

    def __post_init__(self) -> None:
        if self.engine not in get_args(Engine):
            raise ValueError(f"OffloadConfig.engine={self.engine!r}: use one of {', '.join(get_args(Engine))}")
        for name in ("moments", "master_weights", "pin_memory", "measure"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"OffloadConfig.{name}={getattr(self, name)!r}: use True or False")
        if not isinstance(self.master_remainders, bool | None):
            raise ValueError(f"OffloadConfig.master_remainders={self.master_remainders!r}: use True, False or None")
        if not (self.moments or self.master_weights):
            raise ValueError(
                "OffloadConfig.moments=False with master_weights=False offloads nothing: set one of them to "
                "True, or leave optimizer.offload_optimizer_states unset"
            )
        if self.master_remainders and not self.master_weights:
            raise ValueError(
                "OffloadConfig.master_remainders=True with master_weights=False: no master is copied at all; set "
                "master_weights=True, or leave master_remainders at None"
            )
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, int | float):
            raise ValueError(f"OffloadConfig.fraction={self.fraction!r}: use a number in (0, 1]")
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(
                f"OffloadConfig.fraction={self.fraction!r}: use a number in (0, 1]; to offload nothing, leave "
                "optimizer.offload_optimizer_states unset"
            )
        budget = self.gpu_memory_budget_gib
        if budget is not None:
            if budget == "auto":
                pass
            elif isinstance(budget, bool) or not isinstance(budget, int | float) or not 0.0 < budget < float("inf"):
                raise ValueError(
                    f"OffloadConfig.gpu_memory_budget_gib={budget!r}: use a number of GiB above 0, 'auto' or None"
                )
            if self.fraction < 1.0:
                raise ValueError(
                    f"OffloadConfig.gpu_memory_budget_gib={budget!r} with fraction={self.fraction!r}: both say how "
                    "much to offload; leave one of them at its default"
                )
        for name, least in (("slab_bytes", MIB), ("piece_bytes", 64 * 1024)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"OffloadConfig.{name}={value!r}: use a number of bytes of at least {least}")

    @property
    def gpu_memory_budget_bytes(self) -> int | None:
        """`gpu_memory_budget_gib` in bytes; None where there is none, or it is found out in training."""
        budget = self.gpu_memory_budget_gib
        return None if budget is None or isinstance(budget, str) else int(budget * 2**30)

    def native_only_settings(self) -> list[str]:
        """Return the settings, as `name=value`, that differ from the default and only "native" honours."""
        defaults = OffloadConfig()
        return [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name not in ("engine", "measure") and getattr(self, f.name) != getattr(defaults, f.name)
        ]
