"""`bridge-fgo run`: an unmodified training script, with the package installed.

Torch and Megatron are imported by `run` only, never by importing this module.
"""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """A script to run, its arguments, and the package's settings.

    config: the keyword arguments of `bridge_fgo.OffloadConfig` that the user gave; what is missing there keeps the
    default that OffloadConfig documents.
    """

    script: Path
    args: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)


def prepare(request: Request) -> None:
    """Check a request, so that a user's mistake shows before anything is imported or patched.

    Raises:
        ValueError: the script is missing, or OffloadConfig refuses the options.
    """
    if not request.script.is_file():
        raise ValueError(f"there is no script {str(request.script)!r}")
    import bridge_fgo

    bridge_fgo.OffloadConfig(**request.config)


def run(request: Request) -> None:
    """Install the package and run the script as `python SCRIPT ARGS...` would.

    The script sees its own `sys.argv`, its folder as `sys.path[0]`, and
    `__name__ == "__main__"`. Whatever it raises, SystemExit included, passes
    through. `sys.argv` and `sys.path` stay as the script leaves them: its
    threads and exit handlers may still read them.
    """
    import bridge_fgo

    bridge_fgo.install(bridge_fgo.OffloadConfig(**request.config))
    sys.argv = [str(request.script), *request.args]
    if not sys.flags.safe_path:  # under `python -P` the script's folder is not added either
        # Python resolves symbolic links here, so that a linked script finds its neighbours.
        sys.path[0] = os.path.dirname(os.path.realpath(request.script))
    runpy.run_path(str(request.script), run_name="__main__")
