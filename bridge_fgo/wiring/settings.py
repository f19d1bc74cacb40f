"""The settings that are installed: the patched bindings go by them, and pass through where there are none."""

from __future__ import annotations

from bridge_fgo.config import OffloadConfig

_installed: OffloadConfig | None = None


def set_installed_config(config: OffloadConfig | None) -> None:
    """Keep the settings of the installation; None once it is undone."""
    global _installed
    _installed = config


def is_installed() -> bool:
    """Return whether the package is installed: `train()` holds the wrapped step also after an uninstall in mid-run."""
    return _installed is not None


def installed_config() -> OffloadConfig:
    """Return the settings given to `install`; a wrapper runs only where there are some."""
    assert _installed is not None, "nothing is installed"
    return _installed
