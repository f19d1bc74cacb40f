"""What a user may ask of the offload: one small frozen dataclass, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

MIB = 2**20

Engine = Literal["auto", "native", "mcore"]


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Settings of the offload, given to `bridge_fgo.install`.

    The offload itself is turned on per run, by `cfg.optimizer.offload_optimizer_states = True`.

    Raises:
        ValueError: a setting is of the wrong type or out of range; the message names it.
    """

    engine: Engine = "auto"
    """Who moves the bytes. "native": this package's engine, on every mcore. "mcore": the offloader of the
    installed mcore, refused where that mcore has none. "auto": native, but mcore's chunked offloader where its
    own fraction or chunk size is set. Native was the faster in all but one of the runs of both on GPUs, gives
    reserved memory back and saves in the background."""

    moments: bool = True
    """Offload Adam's `exp_avg` and `exp_avg_sq`."""

    master_weights: bool = True
    """Offload the fp32 master weights (or their 16-bit remainders)."""

    master_remainders: bool | None = None
    """Whether to copy of an fp32 master only the 17 bits that the model's bf16 weight does not have, which it was
    rounded to and which stays on the GPU. Only the optimizer may change such weights then, and a checkpoint load: where
    something else has, an error comes before the masters are used. None does so once training is seen to wait for
    copies in two of the first dozen or so steps: where all are hidden behind a long forward and backward, packing would
    only cost time (on an H200 10 ms for 1.64 billion parameters). True does so from the first step on, False never."""

    fraction: float = 1.0
    """Share to offload, in (0, 1], of the bytes that `moments` and `master_weights` ask for. Parameters are
    taken whole, in the optimizer's order, until the share is reached."""

    gpu_memory_budget_gib: float | None = None
    """Peak of GPU memory allocated by PyTorch on a rank, in GiB, under which to keep the run while offloading
    as little as possible. The first steps offload everything and measure. What PyTorch does not allocate (the
    CUDA context, NCCL) comes on top."""

    slab_bytes: int = 1024 * MIB
    """Size in bytes that the states updated in one go aim for at most; where it is less, the geometric mean of the
    optimizer's state and 8 MiB, which costs the least time (0.4 of 20 GB), or a 16th of the state. Each such part has a
    slab for its masters and one for its moments: one GPU allocation and one host buffer each. A tensor is never split,
    so a tensor that is larger makes a larger slab. Parts that are smaller than that mean come and leave in groups of
    its size, where the optimizer step has room for eight of them: they cost the host less so."""

    piece_bytes: int = 64 * MIB
    """Largest single copy between host and GPU, in bytes: a copy of the training loop's own waits for one. On an
    H200 1.2 ms; larger ones cost the host less."""

    pin_memory: bool = True
    """Page-lock the host buffers. Without it a copy cannot overlap computation."""

    def __post_init__(self) -> None:
        if self.engine not in get_args(Engine):
            raise ValueError(f"OffloadConfig.engine={self.engine!r}: use one of {', '.join(get_args(Engine))}")
        for name in ("moments", "master_weights", "pin_memory"):
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
            if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0.0 < budget < float("inf"):
                raise ValueError(
                    f"OffloadConfig.gpu_memory_budget_gib={budget!r}: use a number of GiB above 0, or None"
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
        """The budget in bytes, or None."""
        return None if self.gpu_memory_budget_gib is None else int(self.gpu_memory_budget_gib * 2**30)

    def native_only_settings(self) -> list[str]:
        """Return the settings, as `name=value`, that differ from the default and only "native" honours."""
        defaults = OffloadConfig()
        return [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name != "engine" and getattr(self, f.name) != getattr(defaults, f.name)
        ]
