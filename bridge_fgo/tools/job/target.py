"""What a user names a job by, as far as that can be told without importing torch or Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def is_saved_config(target: str) -> bool:
    """Return whether `target` can only be the path of a saved run config, and no recipe."""
    return Path(target).suffix in (".yaml", ".yml")


def require_saved_config(path: Path) -> dict[str, Any]:
    """Return the content of a saved run config.

    Raises:
        ValueError: the file is not there, is no YAML, or is no saved ConfigContainer.
    """
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read as a run config: {said}") from None
    if content is None:
        raise ValueError(f"{path}: is empty; give the run_config.yaml that Megatron-Bridge has saved")
    if not isinstance(content, dict) or not str(content.get("_target_", "")).endswith("ConfigContainer"):
        raise ValueError(f"{path}: is not a saved run config (what Bridge writes as run_config.yaml)")
    return content
