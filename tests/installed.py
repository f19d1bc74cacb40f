"""Where packages are installed."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path


def folder_of(package: str) -> Path:
    """Return the folder of an installed package, which is not imported: that takes stand-ins."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def apply_patch(folder: Path, patch: Path) -> None:
    """Apply a patch to a folder that is in no repository."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply", patch], cwd=folder, env=environment, check=True, capture_output=True)
