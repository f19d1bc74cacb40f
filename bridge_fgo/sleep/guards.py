"""Errors in place of reads of memory that is gone: hooks and checks on the model's and the optimizer's own methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

Check = Callable[[], None]

STATE_METHODS = (
    "step_with_ready_grads",
    "state_dict",
    "load_state_dict",
    "sharded_state_dict",
    "reload_model_params",
    "save_parameter_state",
    "load_parameter_state",
    "_get_main_param_and_optimizer_states",
    "_copy_main_params_to_param_buffer",
    "_copy_model_params_to_main_params",
)
"""Methods of a DistributedOptimizer by which training and checkpoints get to its states. Those that are not there, in
another mcore, are left out. The check saves what they would do before they touch a tensor: the guard of the tensors
would raise in their midst, and kernels in C++ do not ask it before PyTorch 2.12."""


class Checked:
    """A method of one object, with something called before it, and after it has returned."""

    def __init__(self, owner: Any, name: str, check: Check, after: Check | None) -> None:
        self._owner, self._name = owner, name
        self._check, self._after = check, after
        self._own = vars(owner).get(name)

    @property
    def original(self) -> Callable[..., Any]:
        """The method: what was the object's own, else its class's as it is now, which may have been patched since."""
        if self._own is not None:
            return self._own
        owner = next(cls for cls in type(self._owner).__mro__ if self._name in vars(cls))
        method: Callable[..., Any] = vars(owner)[self._name].__get__(self._owner, type(self._owner))
        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check, and call the method."""
        self._check()
        result = self.original(*args, **kwargs)
        if self._after is not None:
            self._after()
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        """Have a copy of the owner, or what is loaded of it, hold the method: a reference model may be such a copy."""
        return (getattr, (self._owner, self._name)) if self._own is None else (partial, (self._own,))


class ForwardCheck:
    """A module's forward pre-hook that calls a check."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        """Check."""
        self._check()

    def __reduce__(self) -> tuple[Any, ...]:
        """Have a copy of the module hold a hook that does nothing, and needs no package."""
        return getattr, (nullcontext(), "__exit__")


class BackwardCheck(ForwardCheck):
    """A module's forward hook that has a check called before the backward of what the forward returns.

    By a hook on the newest node of the graph, which adds no node: kernels that add to gradients in C++ come later.
    """

    def __call__(self, module: torch.nn.Module, args: Any, output: Any = None) -> None:
        """Register it."""
        for tensor in _tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda grads: self._check())


class Guards:
    """What was put around other objects' methods and modules; `close` takes all of it off again."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def before(self, owner: Any, names: Iterable[str], check: Check, after: Check | None = None) -> None:
        """Have `check` called before methods of one object, and `after` once they have returned."""
        for name in names:
            if callable(getattr(owner, name, None)):
                self._wrap(owner, name, check, after)

    def _wrap(self, owner: Any, name: str, check: Check, after: Check | None) -> None:
        was_own = name in vars(owner)
        checked = Checked(owner, name, check, after)

        def undo() -> None:
            # Where somebody has wrapped it once more, that one keeps it.
            if vars(owner).get(name) is checked:
                if was_own:
                    setattr(owner, name, checked.original)
                else:
                    delattr(owner, name)

        setattr(owner, name, checked)
        self._undo.append(undo)

    def before_forward(self, modules: Iterable[torch.nn.Module], check: Check) -> None:
        """Have `check` called before modules' forwards."""
        for module in modules:
            # First of all hooks: DDP's own would gather parameters.
            handle = module.register_forward_pre_hook(ForwardCheck(check), prepend=True)
            self._undo.append(handle.remove)

    def before_backward(self, modules: Iterable[torch.nn.Module], check: Check) -> None:
        """Have `check` called before the backward of what modules' forwards return."""
        for module in modules:
            self._undo.append(module.register_forward_hook(BackwardCheck(check)).remove)

    def close(self) -> None:
        """Take everything off."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def wrapped_models(chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a model chunk and what it wraps (`module`), down to the model itself: each may be called."""
    found = [chunk]
    while isinstance(inner := getattr(found[-1], "module", None), torch.nn.Module):
        found.append(inner)
    return found


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each)
