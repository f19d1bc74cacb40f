"""Whether masters are packed before they are copied.

They are, once their weights were seen unchanged. Masters that are packed cannot be brought back where something but the
optimizer has changed their weights meanwhile: training ends. So the weights are watched first.

Packing and unpacking take 10.3 ms for 6.6 GB of masters on an H200. A step that hides all of its copies pays that for
nothing: less than 1% of a step that is long enough for them.
"""

from __future__ import annotations

from collections.abc import Callable

WATCHED_STEPS = 4
"""Steps in a row over which the weights are seen unchanged before masters are packed: enough for what writes weights in
each step or in every fourth."""


class PackingPolicy:
    """Decides whether masters are packed: where nothing but the optimizer changes their weights.

    Each rank decides for itself; no bit depends on it.

    Args:
        announce: gets a line when masters begin to be packed.
        warn: gets a line when they never will be, because weights have changed.
    """

    def __init__(self, announce: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self.packs = False  # whether masters that are offloaded from now on are packed
        self.packable_bytes = 0  # bytes of masters that are packed if this says so; without any no weight is watched
        self._announce, self._warn = announce, warn
        self._is_off = False
        self._watched = 0  # steps in a row at whose end the weights' sums were taken

    @property
    def checks_weights(self) -> bool:
        """Whether the weights are to be watched, because masters will be packed soon."""
        return not (self.packs or self._is_off) and self.packable_bytes > 0

    @property
    def can_decide(self) -> bool:
        """Whether the weights were watched for as long as it takes to `decide`."""
        return self.checks_weights and self._watched > WATCHED_STEPS

    def end_step(self, updated: bool) -> None:
        """Count a step, if the optimizer `updated` in it."""
        if updated:
            self._watched = self._watched + 1 if self.checks_weights else 0

    def decide(self, have_changed: bool) -> None:
        """Have masters packed from now on, or never, because weights have changed in a step that was watched."""
        if have_changed:
            self._is_off = True
            self._warn(
                "something but the optimizer changed weights of the model between optimizer steps, or let go of their "
                "memory: masters go on being copied whole (OffloadConfig.master_remainders; with False nothing is "
                "watched)"
            )
        else:
            self.packs = True
            self._announce("from now on masters are copied in part (OffloadConfig.master_remainders)")
