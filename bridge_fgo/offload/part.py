"""A part: the parameters that one call of a source's step updates, with the slabs of their states."""

from __future__ import annotations

import torch

from bridge_fgo.memory.slab import Slab
from bridge_fgo.offload.policy import PartBytes


class Part(PartBytes):
    """Parameters that are updated in one go, and the slabs of their states (masters, moments, or one of them)."""

    def __init__(self, params: list[torch.Tensor], slabs: list[Slab]) -> None:
        super().__init__(sum(slab.block_bytes for slab in slabs), sum(slab.transit_bytes for slab in slabs))
        self.params, self.slabs = params, slabs
        self.packable_bytes = 0  # of its masters that are packed if training is seen to wait for copies
        self.ids = frozenset(id(param) for param in params)
        # whether some of its states are copied to the model's weights once they are updated
        self.written_back = any(slab.written_back for slab in slabs)

    def mark_just_rounded(self) -> None:
        """Note that its states were just updated and copied to the weights that they round to.

        Slabs that leave now are encoded without a check; of a part that stays nothing is encoded.
        """
        for slab in self.slabs:
            if self.stays:
                slab.drop_staging()
            else:
                slab.codec.just_rounded = slab.written_back and slab.codec.family is not None
