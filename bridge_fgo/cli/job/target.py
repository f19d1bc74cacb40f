"""What a user names a job by, as far as that can be told without importing anything."""

from __future__ import annotations

from pathlib import Path


def is_saved_config(target: str) -> bool:
    """Return whether `target` can only be the path of a saved run config, and no recipe."""
    return Path(target).suffix in (".yaml", ".yml")


def require_file(target: str) -> None:
    """Raise ValueError where `target` can only be a saved run config and is no file."""
    if is_saved_config(target) and not Path(target).is_file():
        raise ValueError(f"{target}: there is no such file")
