"""Finds the slabs that have not changed since their reload, which need not be copied to the host again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from bridge_fgo.memory.digest import Digester, digest_kernel
from bridge_fgo.memory.slab import MOST_IN_TRANSIT, Slab, SlabState


class HostCopies:
    """Tells of which slabs the host's copy is current, by a sum over the bytes of each that is taken on reload.

    Only the owner of this moves the slabs; `device` is that of their states.
    """

    def __init__(self, slabs: Sequence[Slab], device: torch.device) -> None:
        digest_kernel(device)  # compiled before the first sleep
        self._slabs = slabs
        self._device = device
        self._digests: dict[Slab, int] = {}
        """The sum over a slab's bytes after its reload."""
        self._sums: dict[Slab, torch.Tensor] = {}
        """Sums of the reload under way, int64 scalars on the GPU; the host has waited for none."""

    def forget(self) -> None:
        """Forget all sums, as somebody else is about to move the slabs."""
        self._digests.clear()
        self._sums.clear()

    def unchanged(self) -> set[Slab]:
        """Return the slabs on the GPU that are as they were reloaded."""
        known = [slab for slab in self._slabs if slab in self._digests and _is_known(slab)]
        tensors = [slab.gpu for slab in known if slab.gpu is not None]
        if not tensors:
            return set()
        sums = Digester(self._device, max(tensor.numel() for tensor in tensors)).of(tensors).tolist()
        return {slab for slab, digest in zip(known, sums, strict=True) if digest == self._digests[slab]}

    def reload_all(self) -> None:
        """Reload every slab that is away, and sum each while others are copied."""
        digester = Digester(self._device, max((slab.nbytes for slab in self._slabs), default=1))
        away: set[Slab] = set()
        """Slabs that this call reloads. Others may have been written since, so that the host has old bytes."""

        def land(slab: Slab) -> None:
            slab.require_readable()
            if slab in away and slab.gpu is not None and _is_known(slab):
                self._sums[slab] = digester.of([slab.gpu])[0]

        coming: deque[Slab] = deque()
        for slab in self._slabs:
            if slab.state is SlabState.RELEASED:
                away.add(slab)
                slab.reload()
            coming.append(slab)
            if len(coming) == MOST_IN_TRANSIT:  # the copies of the others go on while this one is summed
                land(coming.popleft())
        for slab in coming:
            land(slab)

    def finish_reload(self) -> None:
        """Note the sums of what was reloaded; the host waits for them."""
        sums, self._sums = self._sums, {}
        self._digests = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def _is_known(slab: Slab) -> bool:
    """Return whether a slab is on the GPU, whole, in one storage that its states still live in."""
    return (
        slab.state is SlabState.RESIDENT
        and slab.codec.family is None
        and bool(slab.gpu_bytes)
        and all((tensor := state.read()) is not None and slab.holds(tensor) for state in slab.states)
    )
