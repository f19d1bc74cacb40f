"""Stepping a torch optimizer that updates every parameter for itself, for some of its parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
import torch.profiler

from bridge_fgo.states.known_steps import KnownStep, is_upstreams, name_of

_ABSENT = object()


def _is_kinetos(hook: Callable[..., Any]) -> bool:
    """Return whether it is the hook that torch registers itself where `KINETO_USE_DAEMON` is set: it counts steps."""
    return hook is getattr(torch.profiler, "_optimizer_post_hook", None)


@contextmanager
def _kinetos_hook_called_once(adam: torch.optim.Optimizer) -> Iterator[None]:
    """Context of a divided step, at whose end torch's hook is called, instead of once for each part."""
    hooks = torch_optimizer._global_optimizer_post_hooks
    found = {key: hook for key, hook in hooks.items() if _is_kinetos(hook)}
    hooks.update(dict.fromkeys(found, lambda *of_a_part: None))  # in its place: others keep theirs
    try:
        yield
    finally:
        hooks.update(found)
    for hook in found.values():
        hook(adam, (adam,), {})


class InnerStep:
    """Steps TE's FusedAdam, torch's Adam or mcore's Muon in parts, with the same bits.

    Adam updates every element for itself, and Muon every parameter. What is not per parameter is kept exact: FusedAdam
    counts `step` in the param group (torch's Adam in the state of each parameter), so every part is stepped from the
    count before, and the group ends one higher.
    """

    def __init__(self, adam: torch.optim.Optimizer) -> None:
        self._adam = adam
        self._step: Callable[[], Any] = adam.step
        self._shares: dict[Any, list[tuple[dict[str, Any], list[Any], Any]]] = {}
        """Param groups of each owner, its parameters in them, and the groups' counts before the present step."""
        self._known: tuple[Any, KnownStep] | None = None

    def _known_step(self) -> KnownStep:
        """Return what the step's class runs; judged anew only where its `step` is another, as that takes 0.1 ms."""
        cls = type(self._adam)
        if self._known is None or self._known[0] is not cls.step:
            self._known = cls.step, KnownStep(cls)
        return self._known[1]

    def kept_whole_by(self) -> str:
        """Return the name of what forbids to divide the step: it must run once a step, with everything there.

        That is a hook, a method that is not known (see `KnownStep`), and a function of somebody else's in the place of
        one (an average of the weights, a counter); not what only counts: torch's schedulers, and torch's hook for
        Kineto's daemon.
        """
        registries = (
            getattr(self._adam, "_optimizer_step_pre_hooks", {}),
            getattr(self._adam, "_optimizer_step_post_hooks", {}),
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
        found = [f"a hook on it, {name_of(h)}" for hooks in registries for h in hooks.values() if not _is_kinetos(h)]
        known, own, cls = self._known_step(), vars(self._adam), type(self._adam)
        if known.unknown:
            found.append(f"a method that {name_of(cls)} has of its own, {known.unknown}")
        instead = [own[name] for name in sorted(known.methods & own.keys()) if callable(getattr(cls, name, None))]
        found += [f"a function in its place, {name_of(each)}" for each in instead if not is_upstreams(each)]
        return "; ".join(found)

    @contextmanager
    def replaced(self, step: Callable[[], None], owners: Mapping[int, Any]) -> Iterator[None]:
        """Context in which `adam.step()` calls `step`, which calls `update` once for each owner.

        `owners` says whose a parameter is, by its `id`; parameters that are not in it are None's.
        """
        original = self._adam.step
        before = vars(self._adam).get("step", _ABSENT)

        def in_parts(*args: Any, **kwargs: Any) -> None:
            if args or kwargs:
                raise RuntimeError("the optimizer step got arguments that an update in parts cannot honour")
            self._divide(owners)
            with _kinetos_hook_called_once(self._adam):
                step()

        self._step = original
        self._adam.step = in_parts  # type: ignore[method-assign]
        try:
            yield
        finally:
            if before is _ABSENT:
                del self._adam.step
            else:
                self._adam.step = before  # type: ignore[method-assign]

    @contextmanager
    def divided(self, call: Callable[[], Any], owners: Mapping[int, Any]) -> Iterator[None]:
        """Context in which `update` calls `call`, which steps Adam once for the parameters that it finds.

        `owners` is as for `replaced`.
        """
        before, self._step = self._step, call
        self._divide(owners)
        try:
            with _kinetos_hook_called_once(self._adam):
                yield
        finally:
            self._step = before

    def _divide(self, owners: Mapping[int, Any]) -> None:
        self._shares = {}
        for group in self._adam.param_groups:
            of_group: dict[Any, list[Any]] = {}
            for param in group["params"]:
                of_group.setdefault(owners.get(id(param)), []).append(param)
            # Of no parameters it is None's: TE counts its steps, from 2.19 on.
            for owner, params in of_group.items() or [(None, [])]:
                self._shares.setdefault(owner, []).append((group, params, group.get("step", _ABSENT)))

    def update(self, owner: Any) -> None:
        """Step the parameters of one owner."""
        shares = self._shares.get(owner)
        if not shares:
            return
        groups = self._adam.param_groups
        whole = [group["params"] for group, _, _ in shares]
        try:
            for group, params, count in shares:
                group["params"] = params
                if count is _ABSENT:
                    group.pop("step", None)
                else:
                    group["step"] = count
            self._adam.param_groups = [group for group, _, _ in shares]
            self._step()
        finally:
            self._adam.param_groups = groups
            for (group, _, _), params in zip(shares, whole, strict=True):
                group["params"] = params
