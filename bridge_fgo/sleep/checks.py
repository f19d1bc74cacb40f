"""What a `Residency` hooks on a model and its optimizer, beside the guard of each tensor (`memory.guard`).

The guard refuses any use of a tensor that is away from Python, and with PyTorch 2.12 and later from C++ too. Checks run
before a call if that is not enough:

- Before PyTorch 2.12 C++ reads an address of 0: kernels of Transformer Engine in forward, backward and step, and
  collectives.
- A step scales gradients, and a load replaces states, before they touch the first state that is away.
- A save gathers bucket by bucket. A rank whose shard of a bucket is empty touches nothing, and would wait for others.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from bridge_fgo.memory.guard import tensors_in
from bridge_fgo.sleep.gradient_offloader import Backwards
from bridge_fgo.sleep.moved import Kind
from bridge_fgo.sleep.state_offloader import StateOffloader
from bridge_fgo.states.shadowed import replaced

Check = Callable[[], None]


class ForwardCheck:
    """A module's forward pre-hook that calls a check."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        """Check."""
        self._check()

    def __reduce__(self) -> tuple[Any, ...]:
        """Put a hook that does nothing and needs no package into a copy of the module, or a pickled one."""
        return getattr, (nullcontext(), "__exit__")


class BackwardCheck(ForwardCheck):
    """A module's forward hook that calls a check before the backward of what the forward returns.

    It hooks the newest node of the graph, and so adds none: kernels that add to gradients run later.
    """

    def __call__(self, module: torch.nn.Module, args: Any, output: Any = None) -> None:
        """Register it on the output."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda grads: self._check())


class Checks:
    """The checks of one `Residency`; `away` returns what is not on the GPU, `states` is None without an optimizer."""

    def __init__(self, away: Callable[[], frozenset[Kind]], states: StateOffloader | None) -> None:
        self._away, self._states = away, states
        self.swapped = ""  # the name of the kept weights that are in the parameters
        self._undo: list[Callable[[], None]] = []

    def on_model(self, chunks: Sequence[torch.nn.Module], ddps: Sequence[Any], backwards: Backwards) -> None:
        """Check forwards, backwards and collectives of model chunks, until `close`."""

        def require_for_forward() -> None:
            self.require("params")
            if torch.is_grad_enabled():
                self.refuse_training()
                if any(ddp.training for ddp in ddps):
                    self.require("grads")

        def require_for_backward() -> None:
            self.require("params", "grads")
            self.refuse_training()

        for module in (module for chunk in chunks for module in wrapped_models(chunk)):
            # First of all hooks: DDP's own gathers parameters.
            pre_hook = module.register_forward_pre_hook(ForwardCheck(require_for_forward), prepend=True)
            hook = module.register_forward_hook(BackwardCheck(require_for_backward))
            self._undo += [pre_hook.remove, hook.remove]
        for ddp in ddps:
            for kind, names in _COLLECTIVES.items():
                for name in names:
                    self.before(ddp, name, partial(self.require, kind))
            self.before(ddp, "zero_grad_buffer", partial(self.require, "grads"), partial(backwards.zeroed, ddp))
            self._refuse_mcores(*ddp.buffers, *ddp.expert_parallel_buffers)

    def on_optimizer(self, optimizer: Any, backwards: Backwards) -> None:
        """Check steps and loads of what the training loop steps, until `close`."""
        states = self._states
        assert states is not None

        def require_states() -> None:
            if not states.lease.is_served:
                self.require("optimizer")

        def require_for_step() -> None:
            self.require("params", "grads")
            self.refuse_training()
            require_states()

        self.before(optimizer, "step", require_for_step, backwards.used)
        self.before(optimizer, "reload_model_params", self.refuse_training)
        self._refuse_mcores(*states.optimizers)
        for leaf in states.optimizers if states.lease.owner == "sleep" else ():
            self.before(leaf, "step_with_ready_grads", require_states, states.forget_copies)
            for name in _OF_ALL_RANKS:
                self.before(leaf, name, require_states)

    def _refuse_mcores(self, *owners: Any) -> None:
        """Refuse mcore's verbs of sleep on buffers or optimizers, until `close`: they would move offloaded memory."""

        def refuse(name: str) -> None:
            raise RuntimeError(
                f"mcore's {name}() on a model that has a Residency: call the Residency's offload() and reload(), or "
                "close() it first"
            )

        for owner in owners:
            for name in ("offload_to_cpu", "reload_from_cpu", "restore_from_cpu"):
                self.before(owner, name, partial(refuse, name))

    def before(self, owner: Any, name: str, check: Check, after: Check = lambda: None) -> None:
        """Call `check` before a method of one object, and `after` once it has returned, until `close`."""
        if not callable(getattr(owner, name, None)):
            return  # another mcore does without it
        own = vars(owner).get(name)

        def checked(*args: Any, **kwargs: Any) -> Any:
            check()
            # The class's method is looked up now: `install` may have patched it since. It is bound, as in a call
            # without this check: of a call through the class, wrapt below 2.5 has a signature with `self` in it.
            method = inspect.getattr_static(type(owner), name).__get__(owner, type(owner)) if own is None else own
            result = method(*args, **kwargs)
            after()
            return result

        self._undo.append(replaced(owner, name, checked))

    def require(self, *kinds: Kind) -> None:
        """Raise RuntimeError if one of these is away."""
        for kind in kinds:
            if kind in self._away():
                raise RuntimeError(
                    f"{kind!r} were sent off the GPU by Residency.offload, and are used: call reload({kind!r}) first, "
                    "or save and load checkpoints in Residency.checkpointing()"
                )

    def refuse_training(self) -> None:
        """Raise RuntimeError if other weights than the model's own are in its parameters."""
        if self.swapped:
            raise RuntimeError(
                f"training in the block of Residency.weights({self.swapped!r}), whose weights are no optimizer's: end "
                "the block first; inside, run forwards without gradients"
            )

    def close(self) -> None:
        """Remove every check."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._states = None


_COLLECTIVES: dict[Kind, tuple[str, ...]] = {
    "grads": ("start_grad_sync", "finish_grad_sync"),
    "params": ("start_param_sync", "broadcast_params"),
}
"""Methods of mcore's DDP that hand memory to NCCL."""

_OF_ALL_RANKS = ("load_state_dict", "sharded_state_dict", "save_parameter_state", "load_parameter_state")
"""Methods of an optimizer that have collectives, or that replace states before they touch one that is away."""


def wrapped_models(chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a model chunk and what it wraps (`module`), down to the model itself: each may be called."""
    found = [chunk]
    while isinstance(inner := getattr(found[-1], "module", None), torch.nn.Module):
        found.append(inner)
    return found
