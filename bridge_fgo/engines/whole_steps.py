"""Sources whose optimizer step cannot be divided, so that all of their states are on the GPU in it."""

from __future__ import annotations

from collections.abc import Mapping

from bridge_fgo.engines.share import Share
from bridge_fgo.offload.policy import HoldPolicy
from bridge_fgo.states.source import Source


class WholeSteps:
    """Asks in every step which sources these are, says once what keeps a step whole, and has plans count it.

    Args:
        shares: what is offloaded of each source.
        holding: makes the plans, and prints.
    """

    def __init__(self, shares: Mapping[Source, Share], holding: HoldPolicy) -> None:
        self._shares = shares
        self._holding = holding
        self._whole: set[Source] = set()
        """Those that the plans count."""
        self._said: set[str] = set()

    def includes(self, source: Source) -> bool:
        """Return whether a source's step is not divided; what keeps it whole is said once."""
        why = source.kept_whole_by()
        if not why or why in self._said:
            return bool(why)
        alike = [share for each, share in self._shares.items() if each.kept_whole_by() == why]
        if held := sum(slab.nbytes for share in alike for slab in share.slabs):
            self._said.add(why)
            self._holding.warn(
                f"the optimizer step is not divided, because of {why}: it may need every state, so that all "
                f"{held / 2**30:.2f} GiB that are offloaded are on the GPU in the optimizer step; take it away to save "
                "that memory there too"
            )
        return True

    def count(self) -> None:
        """Have plans count all states of these sources; where they have changed, measure anew."""
        whole = {source for source in self._shares if self.includes(source)}
        if whole == self._whole:
            return
        for source in whole ^ self._whole:
            more = self._shares[source].held_more_if_whole_bytes
            self._holding.masters_held_bytes += more if source in whole else -more
        self._whole = whole
        self._holding.forget()
