"""install() and uninstall(): applies the table of patches, now or when Bridge is imported."""

from __future__ import annotations

import sys
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

import wrapt

from bridge_fgo.bridge.settings import set_installed_config
from bridge_fgo.config import OffloadConfig
from bridge_fgo.memory import copy_queues

if TYPE_CHECKING:
    from bridge_fgo.bridge.patch import Patch

_installation: Installation | None = None
_hooked: set[str] = set()


class Installation:
    """The handle that `install` returns; as a context manager it takes that call of `install` back.

    The last call to be taken back uninstalls, so that whoever had it installed before the block has it after it too.
    """

    def __init__(self, config: OffloadConfig) -> None:
        from bridge_fgo.bridge.table import patches

        self.config = config
        self.calls = 0
        """Calls of `install` that are not taken back yet."""
        self._entered = 0
        self._waiting: dict[str, list[Patch]] = {}
        for patch in patches():
            self._waiting.setdefault(patch.module, []).append(patch)
        self._applied: list[tuple[Patch, ModuleType]] = []
        self.keeps_queues = False
        """Whether the number of CUDA's queues for copies in the environment is this installation's."""

    def __enter__(self) -> Installation:
        self._entered += 1
        self.calls = max(self.calls, self._entered)  # where the same handle is entered twice
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
        return list({**self._waiting, **{patch.module: None for patch, _ in self._applied}})

    def apply_to_imported(self) -> None:
        """Apply the patches of every module that is imported: all, or none where one does not fit.

        Raises:
            RuntimeError: a binding is not the one that its patch was written for.
        """
        try:
            self._apply([sys.modules[name] for name in self._waiting if name in sys.modules])
        except BaseException:
            self.undo()
            raise

    def module_imported(self, module: ModuleType) -> None:
        """Apply the patches of a module that has just been imported; undo everything where one fails."""
        try:
            self._apply([module])
        except BaseException:
            uninstall()
            raise

    def _apply(self, modules: list[ModuleType]) -> None:
        ready = [(patch, module) for module in modules for patch in self._waiting.get(module.__name__, [])]
        for patch, module in ready:
            patch.check(module)
        for patch, module in ready:
            self._applied.append((patch, module))  # first: its undo takes back what it did before an error
            patch.apply(module)
            self._waiting.pop(module.__name__, None)

    def check_undo(self) -> None:
        """Raise RuntimeError where someone patched on top of a binding."""
        for patch, module in self._applied:
            patch.check_undo(module)

    def undo(self) -> None:
        """Undo every patch in reverse."""
        for patch, module in reversed(self._applied):
            patch.undo(module)
        self._applied.clear()
        self._waiting.clear()
        set_installed_config(None)
        if self.keeps_queues:
            copy_queues.take_back()
            self.keeps_queues = False


def install(config: OffloadConfig | None = None) -> Installation:
    """Make `cfg.optimizer.offload_optimizer_states = True` work in Megatron-Bridge.

    Works before or after Bridge is imported, and changes nothing in a run that leaves the flag unset but how many
    queues CUDA gives to copies where `CUDA_DEVICE_MAX_CONNECTIONS` asks for few: that is settled when CUDA is first
    asked for anything, `torch.cuda.is_available()` included, so call it before. Calling it again returns the same
    handle; `with install():` takes back its own call only.

    Args:
        config: settings of the offload; the defaults when None.

    Raises:
        ValueError: installed already with other settings, or they are no `OffloadConfig`.
        RuntimeError: the Bridge or mcore here is not one that the patches fit; nothing is patched then.
    """
    global _installation
    if config is not None and not isinstance(config, OffloadConfig):
        raise ValueError(f"bridge_fgo.install({config!r}): give the settings as bridge_fgo.OffloadConfig(...)")
    if _installation is not None:
        if config is not None and config != _installation.config:
            raise ValueError(
                f"bridge_fgo.install({config}) after install({_installation.config}): call bridge_fgo.uninstall() "
                "first to change the settings"
            )
        _installation.calls += 1
        return _installation
    installation = Installation(OffloadConfig() if config is None else config)
    installation.apply_to_imported()
    installation.keeps_queues = copy_queues.keep_enough()
    installation.calls = 1
    _installation = installation
    set_installed_config(installation.config)
    for name in installation.modules:
        if name not in _hooked:
            _hooked.add(name)  # wrapt cannot take a hook back, so one is set at a time, and asks who is installed
            wrapt.register_post_import_hook(_module_imported, name)
    return installation


def _module_imported(module: ModuleType) -> None:
    _hooked.discard(module.__name__)  # wrapt calls it once
    if _installation is not None:
        _installation.module_imported(module)


def uninstall() -> None:
    """Restore every binding exactly; sessions that are attached make their states resident and end.

    Does nothing when not installed.

    Raises:
        RuntimeError: someone patched on top of one of the bindings; names it. Or states cannot be brought back: there
            is no memory for them (`torch.cuda.OutOfMemoryError`), or weights were changed meanwhile. The bindings
            stay then, because without them whoever reads or updates the states would find no memory behind them;
            sessions that could end have ended, and once the cause is gone it may be called again.
    """
    global _installation
    if _installation is None:
        return
    _installation.check_undo()
    if "bridge_fgo.bridge.session" in sys.modules:
        from bridge_fgo.bridge.attaching import close_all

        close_all()
    if "bridge_fgo.sleep.upstream" in sys.modules:
        from bridge_fgo.sleep import upstream

        upstream.leave_to_mcore()
    _installation.undo()
    _installation = None
