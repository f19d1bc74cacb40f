"""The systems that people train on: links between host and GPU, memory and speed, and where the figures come from.

And the floor: the least time that copies over a link add to a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bridge_fgo.config import MIB

GB = 10**9
LEFT_FREE = 16
"""A 16th of the GPU is left to the CUDA context, NCCL and holes between blocks. On an H200 training with the budget
"auto" had a peak of 142.2 of 150.8 GB, that is all but an 18th."""


@dataclass(frozen=True)
class Link:
    """One GPU's link to its host memory, in bytes a second.

    d2h, h2d: each direction alone, or the slower for both; duplex: each way, both directions busy; gpus: of a node;
    measured: whether by this project or by the user; source: of the figures; together: where several GPUs of a host
    that copy at once were measured, how many (fewest first), and d2h, h2d and duplex of each.
    """

    name: str
    d2h: float
    h2d: float
    duplex: float
    gpus: int
    measured: bool
    source: str
    together: tuple[tuple[int, float, float, float], ...] = ()

    @property
    def one_way(self) -> float:
        """The slower direction alone."""
        return min(self.d2h, self.h2d)

    def of_node_with(self, gpus: int) -> Link:
        """Return the link where that many GPUs of a host copy at once: as measured with so many or the next more."""
        for count, d2h, h2d, duplex in self.together:
            if 1 < gpus <= count:
                return replace(self, d2h=d2h, h2d=h2d, duplex=duplex)
        return self

    @property
    def title(self) -> str:
        """The name, with a star where the figures were not measured."""
        return self.name if self.measured else f"{self.name} *"

    @property
    def figures(self) -> str:
        """D2H, H2D, and both at once, in GB/s."""
        return "/".join(f"{speed / 1e9:.0f}" for speed in (self.d2h, self.h2d, self.duplex))


H200_TOGETHER = ((2, 55.3e9, 55.3e9, 43.0e9), (8, 19.7e9, 19.7e9, 11.8e9))
GB300_TOGETHER = ((4, 181.9e9, 168.6e9, 84e9),)


def _like_h200(name: str, why: str, measured: bool = False) -> Link:
    """Return the link of a system of eight GPUs on PCIe, whose host is shared as the H200's was measured to be."""
    return Link(name, 55.4e9, 55.4e9, 50.8e9, 8, measured, why, H200_TOGETHER)


def _like_gb300(name: str, why: str) -> Link:
    """Return the link of a system with two GPUs on each Grace; both at once share what came of its memory one way."""
    return Link(name, 193.5e9, 211.5e9, 168e9, 4, False, why, GB300_TOGETHER)


AS_H200 = "not measured: planned with the H200's figures, whose link is PCIe Gen5 x16 too"
B300_AS_H200 = "not measured: planned with the H200's figures; its PCIe Gen6 may be faster"
H200 = (
    "measured by `bridge-fgo bench`; of two that copy at once each has 55.3 one way, 43.0 both, of eight 19.7 and 11.8"
)
GH200 = (
    "not measured here: nvbandwidth by users (Megatron-LM #6491), four at once as fast; both at once is taken as the "
    "slower; others had D2H 295 and H2D 342 (vLLM #6496)"
)
GB300 = (
    "not measured here: nvbandwidth by users (Megatron-LM #6491); of four that copy at once each has 182/169; both "
    "at once is half of what two GPUs got of their Grace one way"
)
AS_GB300 = "not measured: planned with the GB300's figures, whose Grace and NVLink-C2C it has too"


@dataclass(frozen=True)
class System:
    """A kind of GPU and its node.

    gpu_bytes: as NVIDIA's driver reports them. host_bytes: of a node, by NVIDIA's data sheets of the DGX systems (2 TB)
    and of Grace (480 GB for each). Hosts differ: `bridge-fgo doctor` looks at yours. flops: dense BF16 operations a
    second; bandwidth: of the GPU's memory, bytes a second; both by NVIDIA's data sheets.
    """

    link: Link
    gpu_bytes: int
    host_bytes: int
    flops: float
    bandwidth: float

    @property
    def room(self) -> int:
        """Bytes of the GPU that a job's peak may have."""
        return self.gpu_bytes - self.gpu_bytes // LEFT_FREE


SYSTEMS = {
    system.link.name: system
    for system in (
        System(_like_gb300("GB200", AS_GB300), 189_471 * MIB, 960 * GB, 2.5e15, 8.0e12),
        System(_like_gb300("GB300", GB300), 284_208 * MIB, 960 * GB, 2.5e15, 8.0e12),
        System(_like_h200("B200", AS_H200), 183_359 * MIB, 2_000 * GB, 2.25e15, 8.0e12),
        System(_like_h200("B300", B300_AS_H200), 275_040 * MIB, 2_000 * GB, 2.25e15, 8.0e12),
        System(Link("GH200", 169.9e9, 411.3e9, 169.9e9, 4, False, GH200), 97_871 * MIB, 1_920 * GB, 0.989e15, 4.0e12),
        System(_like_h200("H200", H200, measured=True), 143_771 * MIB, 2_000 * GB, 0.989e15, 4.8e12),
        System(_like_h200("H100", AS_H200), 81_559 * MIB, 2_000 * GB, 0.989e15, 3.35e12),
    )
}


def links(system: str | None = None, link_gbs: float | None = None, gpus_per_node: int | None = None) -> list[Link]:
    """Return the links of a system, or of all; with the user's GB/s each way, or GPUs of a node, where they are given.

    Raises:
        ValueError: no such system, or a number that makes no sense.
    """
    if system is not None and system.upper() not in SYSTEMS:
        raise ValueError(f"--system {system}: use one of {', '.join(SYSTEMS)}")
    if link_gbs is not None and not 0 < link_gbs < math.inf:
        raise ValueError(f"--link-gbs {link_gbs}: use a number of GB/s above 0")
    chosen = [each.link for name, each in SYSTEMS.items() if system is None or system.upper() == name]
    if link_gbs is not None:
        speed = link_gbs * 1e9
        name = "given" if system is None else chosen[0].name
        chosen = [Link(name, speed, speed, speed, chosen[0].gpus, True, "--link-gbs")]
    return [replace(link, gpus=gpus_per_node or link.gpus) for link in chosen]


def floor_seconds(
    nbytes: int, d2h: float, h2d: float, duplex: float, backward: float, first_forward: float, between: float, room: int
) -> float:
    """Return the least time in seconds that a step can get longer by when `nbytes` are copied out and come back.

    States may come back in the last microbatch's backward, and leave in the next first forward, at the full bandwidth
    of one direction. They are updated only when the gradients are final; from then on what is left goes both ways at
    once, until the last is updated and forward begins. A resident run does its update in that time too, so its own time
    `between` backward and forward is not lost.

    Bandwidths are bytes a second: `d2h` and `h2d` in one direction alone, `duplex` each way with both busy. `room` is
    the bytes that activations take and give back; no more may be on the way during forward or backward.
    """
    early = min(nbytes, h2d * backward, room)
    both_ways = (nbytes - early) / duplex
    out_left = early  # as much has not left yet when the last has come and been updated
    late = min(out_left, room)
    span = both_ways + (out_left - late) / d2h + max(late / d2h, first_forward)
    return max(0.0, span - between - first_forward)
