"""install() and uninstall(): applies the table of patches, now or when Bridge is imported.

Global state of a process, beside constants and caches, by what ends it:

- An uninstall: `installation._installation`, `settings._installed`, `settings._written`, `session._sessions`,
  `session._taken`, `session._newest_stats`, `activation_offload._are_added`, `activation_offload._pinned_for_states`,
  `patch.warned`, `frameworks._patched_now`, `framework_moves._made`, `framework_moves._models`,
  `framework_moves._refused`, `framework_moves._left`, `framework_moves._of_new`.
- The block that has set it: `session._active`, `framework_moves._moved`, `fsdp_wrappers._loaded_into`, `masters._late`.
- The end of each object in it: `residency._open`, `activation_offload.askers`, `reporting._measurements`,
  `checkpoint_workers._movers`, `checkpoint_workers._undo`, `gradient_bucket._changed`, `guard._views`,
  `slab._slabs`.
- The next training, or the end of the process: `crash._newest`, `buddies._round`.
- The end of the process: `installation._hooked` and `installation._ended`, as wrapt takes no hook back,
  `settings.caller`, `guard._looks`, and the locks `ranks.collectives` and `guard.touching`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

import wrapt

from bridge_fgo.bridge import framework_names
from bridge_fgo.bridge.settings import set_installed_config
from bridge_fgo.config import OffloadConfig
from bridge_fgo.memory import max_connections
from bridge_fgo.memory.undo import undo_on_error

if TYPE_CHECKING:
    from bridge_fgo.bridge.patch import Patch

FRAMEWORK_MOVES = "bridge_fgo.bridge.framework_moves"  # imported once a framework is patched

_installation: Installation | None = None
_hooked: set[str] = set()
_ended: set[str] = set()  # modules of which a hook has seen the end of the import


class Installation:
    """The handle that `install` returns; as a context manager it undoes that call of `install` at the end of the block.

    Calls are counted: only undoing the last one uninstalls, so an earlier `install()` still holds after the block.
    """

    def __init__(self, config: OffloadConfig) -> None:
        from bridge_fgo.bridge.table import patches

        self.config = config
        self.calls = 0  # calls of `install` that are not taken back yet
        self._entered = 0
        self._waiting: dict[str, list[Patch]] = {}
        self._applied: list[Patch] = []
        self._wait(patches())
        self.frameworks: tuple[str, ...] = ()  # the frameworks whose functions it patches
        self.keeps_queues = False  # whether CUDA's number of queues for copies in the environment is this one's

    def __enter__(self) -> Installation:
        self._entered += 1
        self.calls = max(self.calls, self._entered)  # if the same handle is entered twice
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered -= 1
        self.calls -= 1
        if _installation is not self or self.calls > 0:
            return
        try:
            uninstall()
        except RuntimeError as failure:
            if error is None:
                raise
            error.add_note(f"bridge_fgo.uninstall() at the end of the block failed too: {failure}")

    def uninstall(self) -> None:
        """Uninstall as `bridge_fgo.uninstall` does; do nothing when uninstalled already."""
        if _installation is self:
            uninstall()

    @property
    def modules(self) -> list[str]:
        """The modules that the table patches."""
        return list({**self._waiting, **{patch.module: None for patch in self._applied}})

    def _wait(self, patches: Iterable[Patch]) -> None:
        for patch in patches:
            self._waiting.setdefault(patch.module, []).append(patch)

    def add_frameworks(self, names: Iterable[str]) -> None:
        """Add the patches of frameworks that were not added yet; they wait for their modules."""
        if new := tuple(name for name in names if name not in self.frameworks):
            from bridge_fgo.bridge.frameworks import framework_patches

            patches = framework_patches(new)
            for patch in patches:
                _require_whole(patch.module)
            self.frameworks += new
            self._wait(patches)

    def apply_loaded(self) -> None:
        """Apply the patches of imported modules; a hook that is set already applies those of half imported ones."""
        found = [sys.modules[name] for name in self.modules if name in sys.modules]
        self.apply([module for module in found if not (module.__name__ in _hooked and _is_half_imported(module))])

    def apply(self, modules: list[ModuleType]) -> None:
        """Apply the patches of some modules, once each of them fits, else RuntimeError."""
        ready = [(patch, module) for module in modules for patch in self._waiting.get(module.__name__, [])]
        for patch, module in ready:
            patch.check(module)
        for patch, module in ready:
            self._applied.append(patch)  # first: its undo takes back what it did before an error
            patch.apply(module)
            self._waiting.pop(module.__name__, None)

    def check_undo(self) -> None:
        """Raise RuntimeError if another patch lies on top of a binding, or a framework's model is offloaded."""
        if (moves := sys.modules.get(FRAMEWORK_MOVES)) is not None:
            moves.require_all_here()
        for patch in self._applied:
            patch.check_undo()

    def undo(self) -> None:
        """Undo every patch in reverse."""
        if (moves := sys.modules.get(FRAMEWORK_MOVES)) is not None:
            moves.close_all()
        for patch in reversed(self._applied):
            patch.undo()
        self._applied.clear()
        self._waiting.clear()
        set_installed_config(None)
        if self.keeps_queues:
            max_connections.take_back()
            self.keeps_queues = False


def install(config: OffloadConfig | None = None, frameworks: str | Iterable[str] | None = None) -> Installation:
    """Make `cfg.optimizer.offload_optimizer_states = True` work in Megatron-Bridge.

    Call it before or after the import of Bridge, but before the first use of CUDA (`torch.cuda.is_available()` is one).
    CUDA then reads how many hardware queues copies get, which this function raises if `CUDA_DEVICE_MAX_CONNECTIONS`
    asks for few. Nothing else changes in a run without the flag. A second call returns the same handle;
    `with install():` undoes only its own call.

    Args:
        config: settings of the offload; None for the defaults.
        frameworks: which frameworks of reinforcement learning move their models by `Residency`: "auto" for all that are
            imported, or names ("verl", "skyrl", "nemo_rl"). None for those of the environment variable
            `BRIDGE_FGO_FRAMEWORKS`. A later call may add some.

    Raises:
        ValueError: other settings are installed already, or `config` is not an `OffloadConfig`, or a framework is
            unknown, or a setting of sleeps in the environment is wrong.
        RuntimeError: the patches do not fit this Bridge or mcore. Nothing is patched then.
    """
    global _installation
    if config is not None and not isinstance(config, OffloadConfig):
        raise ValueError(f"bridge_fgo.install({config!r}): give the settings as bridge_fgo.OffloadConfig(...)")
    names = framework_names.framework_names(frameworks)
    framework_names.require_environment()
    if _installation is not None:
        if config is not None and config != _installation.config:
            raise ValueError(
                f"bridge_fgo.install({config}) after install({_installation.config}): call bridge_fgo.uninstall() "
                "first to change the settings"
            )
        _installation.add_frameworks(names)
        _installation.apply_loaded()
        _hook(_installation.modules)
        _installation.calls += 1  # last: the block of a call that failed never ends
        return _installation
    installation = Installation(OffloadConfig() if config is None else config)
    installation.add_frameworks(names)
    with undo_on_error(installation.undo):
        installation.apply_loaded()
    installation.keeps_queues = max_connections.keep_enough()
    installation.calls = 1
    _installation = installation
    set_installed_config(installation.config)
    _hook(installation.modules)
    return installation


def install_with_frameworks() -> None:
    """Install as soon as a framework is imported that the environment variable names; nothing is imported before."""
    for name in framework_names.MODULES:
        _require_whole(name)
    _hook(framework_names.MODULES)


def _is_half_imported(module: ModuleType) -> bool:
    return getattr(module.__spec__, "_initializing", False)


def _require_whole(name: str) -> None:
    """Raise RuntimeError if a framework's module is half imported, and no hook will tell of the end."""
    module = sys.modules.get(name)
    if module is not None and name not in _hooked | _ended and _is_half_imported(module):
        raise RuntimeError(
            f"bridge_fgo was imported or installed amid the import of {name}, whose functions are not there yet: "
            f"import bridge_fgo before {name}"
        )


def _hook(modules: Iterable[str]) -> None:
    for name in modules:
        if name not in _hooked:
            _hooked.add(name)  # wrapt cannot take a hook back, so only one is set, and asks what is installed
            wrapt.register_post_import_hook(_module_imported, name)


def _module_imported(module: ModuleType) -> None:
    _hooked.discard(module.__name__)  # wrapt calls it once
    _ended.add(module.__name__)
    if _installation is None and module.__name__ in framework_names.MODULES:
        if not framework_names.framework_names(None):
            return
        install()
    if _installation is None:
        return
    with undo_on_error(uninstall):
        _installation.apply([module])


def uninstall() -> None:
    """Reload all states, detach from the optimizers and restore every patched binding exactly.

    Does nothing if nothing is installed. Masters that cannot be reloaded, because weights were changed while they were
    copied in part, are given up: a line says so, and using one is an error from then on. States that a `Residency` has
    and cannot reload stay as they are. Everything else is reloaded.

    Raises:
        RuntimeError: another patch lies on top of a binding; the message names it. Or there is no memory to reload the
            states (`torch.cuda.OutOfMemoryError`), or masters need weights that are offloaded. The bindings then stay,
            because code that uses the states would find no memory. Remove the cause and call it again.
    """
    global _installation
    if _installation is None:
        return
    _installation.check_undo()
    from bridge_fgo.bridge import activation_offload, patch, session

    session.close_all()
    activation_offload.forget_waits()
    patch.warned.clear()
    _installation.undo()
    _installation = None
