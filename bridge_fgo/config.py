"""The settings of the offload: one frozen dataclass, which checks its values when it is made.

Every command line, NeMo-Run's settings and `optimizer.offload` of Bridge's config take their names from its fields.
The command lines take their help from the first sentence of each field's docstring (`bridge_fgo.tools.options`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

MIB = 2**20


def readable(nbytes: float) -> str:
    """Return bytes in GiB; below a tenth of one in MiB."""
    return f"{nbytes / 2**30:.2f} GiB" if not 0 < abs(nbytes) < 2**30 / 10 else f"{nbytes / MIB:.2f} MiB"


Engine = Literal["auto", "native", "mcore"]

ALWAYS = ("measure", "activation_waits")
"""Settings that have an effect while the offload is off, and with every engine."""


def needing_offload(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that have no effect while the offload is off."""
    return {name: value for name, value in settings.items() if name not in ALWAYS}


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Settings of the offload, for `bridge_fgo.install` or, under the same names, `cfg.optimizer.offload`.

    `cfg.optimizer.offload_optimizer_states = True` switches the offload on; these settings only say how it works.

    Raises:
        ValueError: a setting has the wrong type or is out of range; the message names the setting and its value.
    """

    engine: Engine = "auto"
    """Engine that copies the states. "native" is this package's own and works with every mcore. "mcore" is the
    offloader of the installed mcore; it is refused if that mcore has none. "auto" selects native, unless a fraction or
    a chunk size of mcore's own offloader is set: then it selects mcore's. On GPUs native was faster in all but one of
    the runs that compared both. It also returns reserved memory to the driver and supports background saves."""

    moments: bool = True
    """Offload the moments, Adam's `exp_avg` and `exp_avg_sq`."""

    master_weights: bool = True
    """Offload the fp32 master weights, or the 16-bit remainders that Transformer Engine keeps of them."""

    master_remainders: bool = False
    """Copy only the 17 bits of a master that its bf16 weight does not hold: a sixth less of fp32 states. To pack and to
    unpack takes 20 ms for 1.64 billion parameters on an H200, so it helps jobs that wait longer than that for copies.
    The other bits come from the bf16 weight, which stays on the GPU, so only the optimizer or a checkpoint load may
    change that weight: the next use of a master whose weight was changed raises an error."""

    fraction: float = 1.0
    """Share of the optimizer state to offload, in (0, 1], by bytes of what `moments` and `master_weights` select. Whole
    parameters are taken in the optimizer's order until the share is reached."""

    gpu_memory_budget_gib: float | Literal["auto"] | None = None
    """Peak GPU memory in GiB to stay below, by offloading as little as possible; "auto": what the GPU has. The peak
    counts the memory that PyTorch allocates on a rank, without the CUDA context and NCCL. The first two steps offload
    everything and measure. "auto" is the memory of the GPU, or the part of it that PyTorch may use
    (`torch.cuda.set_per_process_memory_fraction`, from PyTorch 2.8 on), minus memory that others use and a margin for
    fragmentation. The margin grows if PyTorch's allocator runs short. If everything fits, nothing is offloaded."""

    gradients: bool | Literal["lazy"] = False
    """Allocate gradients only when a backward needs them ("lazy"), and offload them between microbatches too (True).
    A DDP bucket (40 million parameters, by default) is allocated, zeroed, when a backward first adds to one of its
    gradients, and freed when the next step zeroes them. So the peak falls where a step has one microbatch. With True
    each bucket is copied to pinned host memory after its backward in all microbatches but the last, and back before the
    next one. These copies hide behind microbatches of some 5,600 tokens or more on an H200. Needs
    `ddp.overlap_grad_reduce=True`: without it all gradients of a rank are one bucket."""

    host_memory_gib: float | Literal["auto"] | None = None
    """Most host memory in GiB that the ranks of a node take for states; "auto": 7/8 of what is free as training starts.
    What is free is told by cgroups and NUMA nodes. Each rank gets an equal part, and all ranks of the job the least.
    States that do not fit stay on the GPU. A second buffer for background saves counts too: if there is no room for it,
    a save copies. Without a limit, ranks that need more than is free are refused."""

    nvme_folder: str | None = None
    """Keep in a file in this folder, not on the GPU, the states for which `host_memory_gib` has no room. That is "auto"
    then, unless set. The folder is on a local disk with `O_DIRECT` (ext4, XFS); each rank makes a file without a name,
    so a crash leaves none. An update needs final gradients, so a step waits for what it reads, except for what the GPU
    has room for before. It is for jobs that do not fit otherwise, and for long steps. A save's copies of all states are
    in such a file too, until they are written; "fully_reshardable" checkpoints are gathered in host memory by mcore."""

    survive_crash: bool = False
    """Let a restart go on from the last finished step, without a checkpoint, if the node and its keeper still live.
    Host memory of the states is held by a small process too (`bridge-fgo keep -- torchrun ...`), and each slab has two
    buffers, so that one step is always whole: 24 bytes a parameter instead of 12. A restart does at most two steps
    again."""

    copies_to_buddy_every: int | None = None
    """With `survive_crash`, copy a finished step of each rank to another node every so many steps, in the background.
    If a node is lost, a restart goes on from the newest copies, and does so many steps again and those of one copy, for
    which the next one waits. Needs nodes with as many ranks each, and 72 bytes of host memory a parameter in place of
    24: four buffers of a rank's own states and two of another's, so that one copy is whole on both nodes meanwhile."""

    slab_bytes: int = 1024 * MIB
    """Largest part of the optimizer state that is updated in one go, in bytes. The engine uses less if that costs less
    time: the geometric mean of the state and 8 MiB (0.4 GB of 20 GB), or a 16th of the state. A part has one slab for
    its masters and one for its moments; a slab is one GPU allocation and one host buffer. A tensor is never split, so
    a larger one makes a larger slab. If parts are smaller than that mean and the optimizer step has room for eight
    groups of its size, parts are copied in such groups, which saves host time."""

    piece_bytes: int = 64 * MIB
    """Largest single copy between host and GPU, in bytes. With `model.fine_grained_activation_offloading` it is 32 MiB
    at most. A copy that the training loop makes waits for at most two of them: on an H200 2.4 ms with 64 MiB, 1.2 ms
    with 32 MiB. Larger copies cost less host time."""

    pin_memory: bool = True
    """Page-lock the host buffers: only copies from and to pinned memory overlap computation."""

    measure: bool = False
    """Log the peaks of GPU memory also in a run without the offload, to compare the two. It has no other effect: a run
    with `optimizer.offload_optimizer_states` logs them anyway."""

    activation_waits: bool = False
    """Add the waits that mcore's activation offload lacks also in a run without the offload of states.
    With `model.fine_grained_activation_offloading` the copies of mcore 0.19.2 race with each other, and gradients are
    silently wrong. A run with `optimizer.offload_optimizer_states` has the waits anyway."""

    def __post_init__(self) -> None:
        def refuse(name: str, why: str) -> None:
            raise ValueError(f"OffloadConfig.{name}={getattr(self, name)!r}{why}")

        def is_number(value: Any, kinds: Any = int | float) -> bool:
            return isinstance(value, kinds) and not isinstance(value, bool)

        for each in fields(self):
            if type(getattr(self, each.name)).__module__ != "builtins":  # of numpy's a saved config makes zeros
                refuse(each.name, ": use a value of Python's own types")
        if self.engine not in get_args(Engine):
            refuse("engine", f": use one of {', '.join(get_args(Engine))}")
        for name in ("moments", "master_weights", "master_remainders", "survive_crash", "pin_memory", *ALWAYS):
            if not isinstance(getattr(self, name), bool):
                refuse(name, ": use True or False")
        if not (isinstance(self.gradients, bool) or self.gradients == "lazy"):
            refuse("gradients", ": use False, 'lazy' or True")
        if not (self.moments or self.master_weights):
            why = "offloads nothing: set one of them to True, or leave optimizer.offload_optimizer_states unset"
            refuse("moments", f" with master_weights=False {why}")
        if self.master_remainders and not self.master_weights:
            why = "no master is copied at all; set master_weights=True, or leave master_remainders at False"
            refuse("master_remainders", f" with master_weights=False: {why}")
        whole_states: dict[str, Any] = {"moments": True, "master_weights": True, "fraction": 1.0}
        whole_states |= {"master_remainders": False, "host_memory_gib": None, "nvme_folder": None}
        for name, whole in whole_states.items() if self.survive_crash else ():
            if (value := getattr(self, name)) != whole:
                refuse("survive_crash", f" with {name}={value!r}: the host has to have all states; set {name}={whole}")
        every = self.copies_to_buddy_every
        if every is not None and not (is_number(every, int) and every > 0):
            refuse("copies_to_buddy_every", ": use a number of steps above 0, or None")
        if every is not None and not self.survive_crash:
            refuse("copies_to_buddy_every", " with survive_crash=False: no step is kept; set survive_crash=True")
        if not is_number(self.fraction):
            refuse("fraction", ": use a number in (0, 1]")
        if not 0.0 < self.fraction <= 1.0:
            instead = "to offload nothing, leave optimizer.offload_optimizer_states unset"
            refuse("fraction", f": use a number in (0, 1]; {instead}")
        budget = self.gpu_memory_budget_gib
        if budget not in (None, "auto") and not (is_number(budget) and 0.0 < budget < 2**40):
            refuse("gpu_memory_budget_gib", ": use a number of GiB above 0, 'auto' or None")
        if budget is not None and self.fraction < 1.0:
            why = "both say how much to offload; leave one of them at its default"
            refuse("gpu_memory_budget_gib", f" with fraction={self.fraction!r}: {why}")
        limit = self.host_memory_gib
        if limit not in (None, "auto") and not (is_number(limit) and 0.0 < limit < 2**40):
            refuse("host_memory_gib", ": use a number of GiB above 0, 'auto' or None")
        if limit is not None and self.gradients is True:
            why = "gradients that leave between microbatches take host memory that the limit does not count; use 'lazy'"
            refuse("host_memory_gib", f" with gradients=True: {why}")
        folder = self.nvme_folder
        if folder is not None and (not isinstance(folder, str) or not folder):
            refuse("nvme_folder", ": use the path of a folder on a local disk, or None")
        if folder is not None and self.gradients is True:
            refuse("nvme_folder", " with gradients=True: these take host memory that is not counted; use 'lazy'")
        for name, least in (("slab_bytes", MIB), ("piece_bytes", 64 * 1024)):
            if not is_number(getattr(self, name), int) or getattr(self, name) < least:
                refuse(name, f": use a number of bytes of at least {least}")

    @property
    def host_limit_gib(self) -> float | Literal["auto"] | None:
        """`host_memory_gib`, which is "auto" with `nvme_folder` unless it is set."""
        return "auto" if self.host_memory_gib is None and self.nvme_folder is not None else self.host_memory_gib

    @property
    def gpu_memory_budget_bytes(self) -> int | None:
        """`gpu_memory_budget_gib` in bytes; None without a budget, and with "auto", which is found out in training."""
        budget = self.gpu_memory_budget_gib
        return None if budget is None or isinstance(budget, str) else int(budget * 2**30)

    def native_only_settings(self) -> list[str]:
        """Return the settings, as `name=value`, that differ from their default and that only "native" honours."""
        defaults = OffloadConfig()
        return [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name not in ("engine", *ALWAYS) and getattr(self, f.name) != getattr(defaults, f.name)
        ]
