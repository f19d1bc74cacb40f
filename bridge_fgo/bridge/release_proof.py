"""The proof that the flag is no silent no-op: what training steps have released, held against the plan."""

from __future__ import annotations

from bridge_fgo.engines.engine import Engine


class ReleaseProof:
    """Watches steps until one has released what was planned.

    A step that had any state released at least something; and the first step after an update, when every state exists,
    released what was planned.
    """

    enough = 0.95
    """Share of the planned bytes that proves it."""

    def __init__(self) -> None:
        self.is_given = False
        self._updates_before = 0
        self._had_states = False

    def begin_step(self, updates: int) -> None:
        """Begin a training step, before which optimizers had stepped so often."""
        self._updates_before = updates

    def begin_pass(self, engine: Engine) -> None:
        """Note whether there is anything to release."""
        if not self.is_given:
            self._had_states = self._had_states or engine.has_states()

    def end_step(self, engine: Engine, what: str) -> None:
        """Hold the step against the plan.

        Args:
            engine: what released.
            what: asked for the offload.

        Raises:
            RuntimeError: the flag is a no-op, in whole or in part.
        """
        if self.is_given:
            return
        planned, freed = engine.planned_bytes, engine.traffic.most_released
        complete = self._updates_before > 0
        if freed < (self.enough * planned if complete else int(self._had_states)):
            raise RuntimeError(
                f"{what}, but a training step released {freed} bytes of the {planned} planned (engine {engine.name}): "
                "the flag would be a silent no-op. Please report this with the output of the run, and train with the "
                "flag unset meanwhile"
            )
        self.is_given = complete
