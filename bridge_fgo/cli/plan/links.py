"""The links between host and GPU of the systems that people train on, and where the figures come from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial


@dataclass(frozen=True)
class Link:
    """One GPU's link to its host memory, in bytes a second.

    one_way: the slower direction alone; duplex: each way, both directions busy; gpus: of a node; measured: whether by
    this project or by the user; source: of the figures; together: where several GPUs of a host that copy at once were
    measured, how many (fewest first), and one_way and duplex of each.
    """

    name: str
    one_way: float
    duplex: float
    gpus: int
    measured: bool
    source: str
    together: tuple[tuple[int, float, float], ...] = ()

    def of_node_with(self, gpus: int) -> Link:
        """Return the link where that many GPUs of a host copy at once: as measured with so many or the next more."""
        for count, one_way, duplex in self.together:
            if 1 < gpus <= count:
                return replace(self, one_way=one_way, duplex=duplex)
        return self

    @property
    def title(self) -> str:
        """The name, with a star where the figures were not measured."""
        return self.name if self.measured else f"{self.name} *"

    @property
    def figures(self) -> str:
        """Both speeds in GB/s."""
        return f"{self.one_way / 1e9:.0f} / {self.duplex / 1e9:.0f}"


LINKS = {
    link.name: link
    for link in (
        Link(
            "GB200",
            225e9,
            128e9,
            4,
            False,
            "not measured: NVLink-C2C 900 GB/s both ways for the two GPUs of a Grace, whose LPDDR5X gives up to 512 "
            "GB/s (NVIDIA, GB200 NVL72 and Grace CPU data sheets)",
        ),
        Link(
            "GH200",
            297e9,
            243e9,
            4,
            False,
            "not measured here: D2H 297 and H2D 375 GB/s, STREAM on LPDDR5X 486 GB/s (Schieffer et al., Harnessing "
            "Integrated CPU-GPU System Memory for HPC, ICPP 2024, arXiv:2407.07850)",
        ),
        Link(
            "H200",
            55.4e9,
            50.8e9,
            8,
            True,
            "measured by `bridge-fgo bench`, the GPUs of a host copying at once: one 55.4 and 50.8, two 55.3 and 43.0, "
            "eight 19.7 and 11.8; hosts differ, and `bridge-fgo doctor` measures yours",
            ((2, 55.3e9, 43.0e9), (8, 19.7e9, 11.8e9)),
        ),
        Link(
            "H100",
            64e9,
            64e9,
            8,
            False,
            "not measured: PCIe Gen5 x16, 128 GB/s both ways together (NVIDIA, H100 data sheet)",
        ),
    )
}


def links(system: str | None, link_gbs: float | None, gpus_per_node: int | None) -> list[Link]:
    """Return the links whose copies to estimate.

    Args:
        system: one of `LINKS`; None for all.
        link_gbs: GB/s each way, measured by the user, instead of the listed figures.
        gpus_per_node: instead of the listed number.

    Raises:
        ValueError: no such system, or a number that makes no sense.
    """
    if system is not None and system.upper() not in LINKS:
        raise ValueError(f"--system {system}: use one of {', '.join(LINKS)}")
    if link_gbs is not None and not 0 < link_gbs < math.inf:
        raise ValueError(f"--link-gbs {link_gbs}: use a number of GB/s above 0")
    if gpus_per_node is not None and gpus_per_node < 1:
        raise ValueError(f"--gpus-per-node {gpus_per_node}: use 1 or more")
    chosen = list(LINKS.values()) if system is None else [LINKS[system.upper()]]
    if link_gbs is not None:
        speed = link_gbs * 1e9
        given = partial(replace, one_way=speed, duplex=speed, measured=True, source="--link-gbs", together=())
        chosen = [given(link) for link in chosen]
        if system is None:
            chosen = [replace(chosen[0], name="given")]
    return [replace(link, gpus=gpus_per_node or link.gpus) for link in chosen]
