"""The table of patches of reinforcement learning's frameworks, whose functions then move memory by a `Residency`.

A framework calls its own functions as before, from its own loop. Each patch replaces the bindings of one module, all of
them or none: if one has parameters that its wrapper does not know, a call could ask for something that is not done.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple, override

from bridge_fgo.bridge import framework_moves as moves
from bridge_fgo.bridge.framework_names import MEMORY_SAVED, NEMO_RL, SKYRL, VERL
from bridge_fgo.bridge.patch import Patch, Wrapper, owner_of
from bridge_fgo.bridge.reporting import say

RAYS_OWN = "_ray_trace_ctx"  # parameter that Ray adds to the methods of actors, for its tracing

PASSED_ON = ("args", "kwargs")
"""Parameters of a decorator that passes all on, and does not say what; for a function without any they are as good."""


class Target(NamedTuple):
    """A function that is replaced, and why this binding."""

    name: str  # the function's name, or "Class.method"
    parameters: tuple[str, ...]  # all that it has, without `self`
    wrapper: Wrapper
    why: str


class FrameworkPatch(Patch):
    """Wraps functions of one module of a framework, whose import the patch waits for.

    A module that does not fit is left alone, and a line on rank 0 says why: `left_alone`. `needs` is the patch of a
    module that is imported before, without which this one would be wrong.
    """

    def __init__(
        self,
        framework: str,
        module: str,
        targets: tuple[Target, ...] = (),
        left_alone: str = "",
        needs: FrameworkPatch | None = None,
    ) -> None:
        super().__init__()
        self._needs = needs
        self.framework, self.module, self.name = framework, module, module
        self._targets, self._left_alone = targets, left_alone
        self._bypasses: list[tuple[type, str, Any]] = []  # methods that `_take_bypasses` has deleted from classes

    @override
    def check(self, module: ModuleType) -> None:
        """Note why the module does not fit; never raises, as the framework works without."""
        if self._needs is not None and self._needs._left_alone:
            self._left_alone = f"{self._needs.module} is"
        for target in self._targets:
            owner, attribute = owner_of(module, target.name)
            function = getattr(owner, attribute, None)
            if not callable(function):
                self._left_alone = f"it has no {target.name}"
                return
            own = tuple(name for name in inspect.signature(function).parameters if name not in ("self", RAYS_OWN))
            if own != target.parameters and (target.parameters or own != PASSED_ON):
                self._left_alone = (
                    f"{target.name} has the parameters ({', '.join(own)}), and not ({', '.join(target.parameters)})"
                )
                return

    @override
    def apply(self, module: ModuleType) -> None:
        if self._left_alone:
            say(f"{self.framework}: {self.module} is left alone: {self._left_alone}")
            return
        for target in self._targets:
            owner, attribute = owner_of(module, target.name)
            wrapped = vars(owner).get(attribute, getattr(owner, attribute))
            ours = _patched(wrapped, target.wrapper, self.module, is_method=owner is not module)
            self.replace(owner, attribute, ours)
            if owner is not module:
                self._take_bypasses(module, owner, attribute)
                continue
            for other in _importers(module, attribute, wrapped):
                self.replace(other, attribute, ours)
        _patched_now.add(self.module)
        names = ", ".join(target.name for target in self._targets)
        say(f"{self.framework}: Residency moves the memory of {self.module}: {names}")

    def _take_bypasses(self, module: ModuleType, owner: type, attribute: str) -> None:
        """Delete a method from the classes that Ray made of subclasses, into which it has copied it."""
        for value in list(vars(module).values()):
            made = getattr(getattr(value, "__ray_metadata__", None), "modified_class", None)
            if inspect.isclass(made) and issubclass(made, owner) and attribute in vars(made):
                self._bypasses.append((made, attribute, vars(made)[attribute]))
                delattr(made, attribute)

    @override
    def undo(self) -> None:
        super().undo()
        _patched_now.discard(self.module)
        while self._bypasses:
            setattr(*self._bypasses.pop())


_patched_now = set[str]()
"""Modules whose functions are patched now; code that has imported one by name keeps it after an uninstall."""


def _patched(function: Any, wrapper: Wrapper, module: str, is_method: bool) -> Any:
    """Return the function that calls a wrapper: a plain one of the same name, as Ray pickles it by its name."""

    @functools.wraps(function)
    def ours(*args: Any, **kwargs: Any) -> Any:
        if module not in _patched_now:
            return function(*args, **kwargs)
        kwargs.pop(RAYS_OWN, None)
        if not is_method:
            return wrapper(function, None, args, kwargs)
        return wrapper(functools.partial(function, args[0]), args[0], args[1:], kwargs)

    return ours


def _importers(module: ModuleType, name: str, function: Any) -> list[ModuleType]:
    """Return other modules of the same package that have imported a function by name, before it was patched."""
    package = module.__name__.partition(".")[0]
    loaded = [(key, each) for key, each in list(sys.modules.items()) if key.partition(".")[0] == package]
    return [each for _, each in loaded if each is not module and vars(each).get(name) is function]


_MODELS = ("models",)
_OPTIMIZERS = ("optimizers",)

_OF_VERL_FUNCTIONS = (
    Target("offload_megatron_model_to_cpu", _MODELS, moves.verl_offload_model,
        "its engine, and whoever offloads a model by itself, ends in it"),
    Target("load_megatron_model_to_gpu", ("models", "load_grad", "load_frozen_params"), moves.verl_load_model,
        "the one way back, also before a weight sync and a checkpoint"),
    Target("offload_megatron_optimizer", _OPTIMIZERS, moves.verl_offload_optimizer,
        "replaces each state by a copy on the CPU, of which a Residency would know nothing"),
    Target("load_megatron_optimizer", _OPTIMIZERS, moves.verl_load_optimizer, "the one way back"),
    Target("copy_megatron_model_to_cpu", _MODELS, moves.verl_with_parameters,
        "reads `param_data.cpu_data` of offloaded buffers, which a Residency does not make"),
    Target("restore_megatron_model_from_cpu", ("models", "cpu_state"), moves.verl_with_parameters,
        "writes `param_data.cpu_data` of offloaded buffers"),
)  # fmt: skip

_OF_VERL_ENGINE = (
    Target("MegatronEngine.to", ("device", "model", "optimizer", "grad"), moves.verl_to,
        "knows the model and its optimizer, and what is asked of both: all of it moves in one call"),
    Target("MegatronEngine.save_checkpoint",
        ("local_path", "hdfs_path", "global_step", "max_ckpt_to_keep", "kwargs"), moves.verl_save,
        "loads parameters where a rank's own memory says so, and a load is a collective"),
)  # fmt: skip

_OF_SKYRL = (
    Target("MegatronStrategy.offload_to_cpu", ("model", "optimizer", "offload_optimizer", "offload_model"),
        moves.skyrl_offload, "every sleep of a policy, a critic and a reference model ends in it, with its optimizer"),
    Target("MegatronStrategy.backload_to_gpu", ("model", "optimizer", "backload_optimizer", "backload_model"),
        moves.skyrl_backload, "the one way back"),
)  # fmt: skip


def _of_nemo_rl(cls: str) -> tuple[Target, ...]:
    parameters = "model", "device", "move_params", "move_grads"
    return (
        Target(f"{cls}.move_model", parameters, moves.nemo_rl_move_model,
            "every move of parameters and gradients ends in it"),
        Target(f"{cls}.move_optimizer", ("device",), moves.nemo_rl_move_optimizer,
            "every move of optimizer states ends in it; its own moves no masters"),
    )  # fmt: skip


_OF_NEMO_RL_POLICY = (
    *_of_nemo_rl("MegatronPolicyWorkerImpl"),
    Target("MegatronPolicyWorkerImpl.offload_after_refit", (), moves.nemo_rl_offload_after_refit,
        "moves all there is, by several of these: here in one call"),
    Target("MegatronPolicyWorkerImpl.offload_before_refit", (), moves.nemo_rl_offload_before_refit,
        "moves gradients and states, each by itself: here in one call"),
    Target("MegatronPolicyWorkerImpl.prepare_for_training", ("args", "kwargs"), moves.nemo_rl_prepare_for_training,
        "moves all back: in one call parameters are recomputed from their masters, and are not copied"),
)  # fmt: skip

_BY_MEMORY_SAVER = (
    "its sleep() is torch_memory_saver's pause(), which is preloaded and moves all memory of the process; there is no "
    "function of its own that moves a model"
)


def framework_patches(names: Iterable[str]) -> list[FrameworkPatch]:
    """Return the patches of frameworks, freshly made: a patch remembers what it replaced."""
    verl = FrameworkPatch("verl", VERL[0], _OF_VERL_FUNCTIONS)
    table = [
        verl,
        FrameworkPatch("verl", VERL[1], _OF_VERL_ENGINE, needs=verl),
        FrameworkPatch("skyrl", SKYRL[0], _OF_SKYRL),
        FrameworkPatch("nemo_rl", NEMO_RL[0], _OF_NEMO_RL_POLICY),
        FrameworkPatch("nemo_rl", NEMO_RL[1], _of_nemo_rl("MegatronValueWorkerImpl")),
        *(FrameworkPatch(name, module, left_alone=_BY_MEMORY_SAVER) for name, (module,) in MEMORY_SAVED.items()),
    ]
    return [patch for patch in table if patch.framework in set(names)]
