"""The public `Residency`: sleep, and what it has to do with patched checkpoints and training steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, override

from bridge_fgo.bridge.compat import FLAG
from bridge_fgo.bridge.session import Session, active_session
from bridge_fgo.bridge.settings import is_installed
from bridge_fgo.sleep import residency
from bridge_fgo.sleep.moved import Kind


class Residency(residency.Residency):
    """As `bridge_fgo.sleep.residency.Residency`, which see for its arguments and for the errors."""

    _session: Session | None = None
    """What drives training steps; None before the first."""

    @override
    def _put_on_checks(self, optimizer: Any) -> None:
        super()._put_on_checks(optimizer)
        for ddp in self._ddps:
            self._checks.before(ddp, "finish_grad_sync", self._gradients_ready)

    # Training steps.

    @contextmanager
    def training_step(self, microbatches: int = 1) -> Iterator[None]:
        """Context of one training step of a loop of one's own, in which the optimizer state is offloaded.

        As Bridge's `train_step` with the flag: states leave as it begins, come back as gradients are finalized (mcore's
        `finalize_model_grads_func`, or DDP's `finish_grad_sync`) or the optimizer steps, and step by parts. Afterwards
        the parts whose memory others needed are away ("optimizer" is in `away`, of a model with several parts), until
        the next step, or until `reload` brings them.

        Inside, forwards and backwards of all microbatches, then one `optimizer.step()`, which may skip the update.
        Where the block raises before that, nothing is lost, and the next block may follow.

        Args:
            microbatches: how many the block runs; steps of as many need as much memory.

        Raises:
            ValueError: the Residency has no optimizer, or its engine is Bridge's, by the flag. Or `microbatches`.
            RuntimeError: `bridge_fgo.install()` was not called; a training step is running; parameters or gradients
                are away. Nothing has moved. Or an error has ended an optimizer step half-way.
        """
        session = self._begin(microbatches)
        with session.training_step(self._chunks, microbatches):
            updates = session.updates
            session.begin_pass()
            session.release()
            yield
            session.updated = session.updates > updates

    def _begin(self, microbatches: int) -> Session:
        self._require_open()
        states = self._states
        if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
            raise ValueError(f"training_step(microbatches={microbatches!r}): give how many the step runs, at least 1")
        if states is None:
            raise ValueError("training_step() of a Residency that was made with optimizer=None: give it the optimizer")
        if not states.is_owner:
            raise ValueError(
                f"training_step() with optimizer.{FLAG}=True: Bridge's train_step offloads already; leave the context "
                "out, or unset the flag in a loop of your own"
            )
        if not is_installed():
            raise RuntimeError("training_step() needs mcore's optimizer to be patched: call bridge_fgo.install() first")
        if active_session() is not None:
            raise RuntimeError("training_step() inside of a training step: end that one first")
        self._checks.require("params", "grads")
        if self._session is None or self._session.closed:  # by an uninstall
            from megatron.core.utils import get_model_config

            states.drive()
            self._session = Session.over(states, get_model_config(self._chunks[0]))
        return self._session

    def _gradients_ready(self) -> None:
        session = active_session()
        if session is not None and session is self._session:
            session.reload()

    @override
    def _let_go(self) -> None:
        if self._session is not None and not self._session.closed:
            self._session.close()
        super()._let_go()

    # Checkpoints.

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Context in which a checkpoint may be saved or loaded, asleep or not; afterwards, as with `only`, as before.

        Parameters are on the GPU inside: they come back if they are away, so every rank has to take part. Optimizer
        state stays where it is with `bridge_fgo.install()`: it is saved from the host, and loaded to there. Without,
        it comes back too. Gradients stay away.

        Raises:
            torch.OutOfMemoryError, RuntimeError: as `reload`, before the block, and `offload`, after it.
        """
        states = self._states if is_installed() else None

        def needed() -> frozenset[Kind]:
            if states is None:
                return frozenset(self._parts) - {"grads"}
            states.require_whole()
            return frozenset({"params"})

        with self._as_before():  # what is loaded is loaded to the host
            self._reload(needed)
            with nullcontext() if states is None else states.served():
                yield
