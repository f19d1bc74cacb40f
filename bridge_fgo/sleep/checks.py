"""What a `Residency` puts on a model and its optimizer, so that memory that is gone is not read but is an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridge_fgo.sleep.gradients import Backwards
from bridge_fgo.sleep.guards import STATE_METHODS, Guards, wrapped_models
from bridge_fgo.sleep.model import Model
from bridge_fgo.sleep.moved import Kind
from bridge_fgo.sleep.states import OptimizerStates


class Checks:
    """The checks of one `Residency`.

    Args:
        model: what it moves of the model.
        states: what it moves of the optimizer; None where it moves nothing of one.
        away: returns what is not on the GPU.
    """

    def __init__(self, model: Model, states: OptimizerStates | None, away: Callable[[], frozenset[Kind]]) -> None:
        self._model, self._states, self._away = model, states, away
        self._guards = Guards()

    def put_on(self, chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
        """Have the methods of model chunks and of what the training loop steps checked, until `close`."""
        guards = self._guards
        models = [module for chunk in chunks for module in wrapped_models(chunk)]
        guards.before_forward(models, self._require_for_forward)
        guards.before_backward(models, lambda: self.require("params", "grads"))
        for module in models:
            guards.before(
                module, ("state_dict", "load_state_dict", "sharded_state_dict"), lambda: self.require("params")
            )
        for ddp, backwards in zip(self._model.ddps, self._model.backwards, strict=True):

            def zeroed(backwards: Backwards = backwards) -> None:
                backwards.is_pending = False

            guards.before(ddp, ("zero_grad_buffer",), lambda: self.require("grads"), zeroed)
            guards.before(
                ddp, ("start_grad_sync", "finish_grad_sync", "scale_gradients"), lambda: self.require("grads")
            )
            guards.before(ddp, ("start_param_sync", "broadcast_params"), lambda: self.require("params"))
        states = self._states
        if optimizer is None or states is None:
            return
        guards.before(optimizer, ("step",), self._require_for_step, self._model.gradients_are_used)
        if states.is_owner:

            def stepping() -> None:
                states.may_be_unchanged = False

            for leaf in states.optimizers:
                guards.before(leaf, STATE_METHODS, self._require_states)
                guards.before(leaf, ("step_with_ready_grads",), stepping)

    def before_gradients_are_finished(self, call: Callable[[], None]) -> None:
        """Have `call` called before DDP finishes its gradients: the last backward is done."""
        for ddp in self._model.ddps:
            self._guards.before(ddp, ("finish_grad_sync",), call)

    def require(self, *kinds: Kind) -> None:
        """Raise RuntimeError where one of these is away."""
        for kind in kinds:
            if kind in self._away():
                raise RuntimeError(
                    f"{kind!r} were sent off the GPU by Residency.offload, and are used: call reload({kind!r}) first, "
                    "or save and load checkpoints in Residency.checkpointing()"
                )

    def _require_for_forward(self) -> None:
        self.require("params")
        if torch.is_grad_enabled() and any(ddp.training for ddp in self._model.ddps):
            self.require("grads")

    def _require_for_step(self) -> None:
        self.require("params", "grads")
        self._require_states()

    def _require_states(self) -> None:
        if self._states is not None and not self._states.is_served:
            self.require("optimizer")

    def close(self) -> None:
        """Take everything off, and let go of the optimizer's states."""
        self._guards.close()
        self._states = None
