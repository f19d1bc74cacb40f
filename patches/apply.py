"""Applies the series to Megatron-Bridge 0.6 or its `main`: to a repository, or to an installed wheel.

    python patches/apply.py FOLDER

FOLDER is a clone of Megatron-Bridge (it holds `src/megatron/bridge`; the commits are made by `git am`), or a
`site-packages` (it holds `megatron/bridge`; the files are changed in place, without the series' tests, which a
wheel has no folder for). All of the series is applied or nothing. Needs git, and nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SERIES = sorted(Path(__file__).resolve().parent.glob("*.patch"))
MARKER = "megatron/bridge/training/optimizer_state_offload.py"


def apply(folder: Path) -> str:
    """Apply the series; return what was done.

    Raises:
        ValueError: `folder` holds no Bridge, or the series is applied already.
        RuntimeError: a patch does not fit; `folder` is as it was.
    """
    folder = folder.resolve()
    is_repository = (folder / "src/megatron/bridge").is_dir()
    source = folder / "src" if is_repository else folder
    if not (source / "megatron/bridge").is_dir():
        raise ValueError(f"{folder} has neither src/megatron/bridge nor megatron/bridge: give a clone or site-packages")
    if (source / MARKER).exists():
        raise ValueError(f"{source / MARKER} is there: the series is applied already")
    if is_repository:
        try:
            _git(folder, "am", "--quiet", "--keep-non-patch", *SERIES)  # whose "[training]" is kept
        except RuntimeError:
            _git(folder, "am", "--abort")
            raise
        return f"{len(SERIES)} commits made in {folder}"
    # As one patch, because git applies all of one or nothing, but each of several by itself.
    _git(folder, "apply", "-p2", "--include=megatron/*", patch="".join(patch.read_text() for patch in SERIES))
    return f"{source / 'megatron/bridge'} is patched"


def _git(folder: Path, *command: str | Path, patch: str = "") -> None:
    # git must not find a repository that site-packages lies in: `git apply` would take that for the root of the
    # patch's paths, find none of them under site-packages, and change nothing, with status 0.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        ["git", *command], cwd=folder, env=environment, input=patch, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"git {command[0]} in {folder}: {done.stdout}{done.stderr}")


if __name__ == "__main__":
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(__doc__)
        sys.exit()
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("patches/apply.py: give one FOLDER, a clone of Megatron-Bridge or a site-packages", file=sys.stderr)
        sys.exit(2)
    try:
        print(apply(Path(sys.argv[1])))
    except (ValueError, RuntimeError) as error:
        print(f"patches/apply.py: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
