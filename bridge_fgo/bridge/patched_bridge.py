"""A Bridge that has the series in `patches/` applied: it leaves the loop to this package while it is installed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import override

from bridge_fgo.bridge.patch import Patch

SERIES_MODULE = "megatron.bridge.training.optimizer_state_offload"
DRIVER = "EXTERNAL_DRIVER"


class StandAsidePatch(Patch):
    """Makes a patched Bridge's own calls to mcore's offloader do nothing.

    Why all of them: two drivers of the same states would undo each other, and of the two only this package has
    the native engine, and knows the readers between steps. Does nothing to a Bridge that is not patched. Bridge's
    config module imports the series' module, so the latter is there when the former is.
    """

    module = "megatron.bridge.training.config"
    name = f"{SERIES_MODULE}.{DRIVER}"

    @override
    def check(self, module: ModuleType) -> None:
        series = sys.modules.get(SERIES_MODULE)
        if series is None:
            return
        driver = getattr(series, DRIVER, self)
        if driver is not None:
            found = f"is {driver!r}" if driver is not self else "is not there"
            raise RuntimeError(
                f"bridge_fgo cannot take over from this patched Megatron-Bridge: {self.name} {found}; apply the "
                "patches of this version of bridge-fgo, and let no other package drive the offload"
            )

    @override
    def apply(self, module: ModuleType) -> None:
        if SERIES_MODULE in sys.modules:
            setattr(sys.modules[SERIES_MODULE], DRIVER, "bridge_fgo")

    @override
    def check_undo(self, module: ModuleType) -> None:
        series = sys.modules.get(SERIES_MODULE)
        if series is not None and getattr(series, DRIVER) != "bridge_fgo":
            raise RuntimeError(f"bridge_fgo cannot uninstall: {self.name} was set after bridge_fgo.install()")

    @override
    def undo(self, module: ModuleType) -> None:
        if SERIES_MODULE in sys.modules:
            setattr(sys.modules[SERIES_MODULE], DRIVER, None)
