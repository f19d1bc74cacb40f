"""The `Residency` of the package's interface: phases, and what they have to do with patched checkpoints and steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from bridge_fgo.phases import residency
from bridge_fgo.phases.residency import Kind
from bridge_fgo.wiring.settings import is_installed


class Residency(residency.Residency):
    """As `bridge_fgo.phases.residency.Residency`, which see for its arguments and for the errors."""

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Context in which a checkpoint may be saved or loaded, asleep or not; afterwards it is as it was before.

        Parameters are on the GPU inside: they come back if they are away, so every rank has to take part. Optimizer
        state stays where it is with `bridge_fgo.install()`: it is saved from the host, and loaded to there. Without,
        it comes back too. Gradients stay away.

        Raises:
            torch.OutOfMemoryError, RuntimeError: as `reload`, before the block, and `offload`, after it.
        """
        before = self.away
        states = self._states
        serves = states is not None and is_installed()
        needed: set[Kind] = {"params"} if serves or states is None else {"params", "optimizer"}
        if states is not None and serves:
            states.require_whole()
        try:
            self.reload(*needed)
            with states.served() if states is not None and serves else nullcontext():
                yield
        finally:
            if gone := before - self.away:
                self.offload(*gone)
            if back := self.away - before:  # what is loaded is loaded to the host
                self.reload(*back)
