"""Keeps `bridge-fgo run` in front of a script that starts itself anew.

Megatron-Bridge's own `scripts/training/run_recipe.py` sets its recipe's environment and calls
`os.execvpe(sys.executable, [sys.executable, SCRIPT, ...])`: in the new process the package would not be installed, and
the flag would be an unknown override, or on an mcore that has it a silent no-op.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

EXECS = ("execv", "execve")
"""Functions of `os` that all others of `exec*` end in."""
WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Options of Python that the next word belongs to."""


def keep(script: Path, is_module: bool, options: Sequence[str]) -> None:
    """Have this process, where it replaces itself by the same script, run that by `bridge-fgo run` again.

    Args:
        script: a file, or the dotted name of a module.
        is_module: whether it is a module.
        options: of `bridge-fgo run`.
    """

    def through(original: Callable[..., Any]) -> Callable[..., Any]:
        def replace_process(path: Any, arguments: Sequence[Any], *environment: Any) -> Any:
            return original(path, with_run(path, arguments, script, is_module, options), *environment)

        return replace_process

    for name in EXECS:
        setattr(os, name, through(getattr(os, name)))


def with_run(
    path: Any, arguments: Sequence[Any], script: Path, is_module: bool, options: Sequence[str]
) -> Sequence[Any]:
    """Return the arguments of a new process, with `-m bridge_fgo run OPTIONS` before the script where it is the same.

    path: of the program; arguments: its own name first. Options of Python itself stay where they are.
    """
    if isinstance(path, int):  # a file descriptor
        return arguments
    words = [os.fsdecode(word) for word in arguments]
    place = place_of_script(words) if os.path.basename(os.fsdecode(path)).startswith("python") else None
    if place is None:
        return arguments
    if is_module:
        is_same = words[place : place + 2] == ["-m", str(script)]
    else:
        is_same = os.path.exists(words[place]) and os.path.samefile(words[place], script)
    return [*words[:place], "-m", "bridge_fgo", "run", *options, *words[place:]] if is_same else arguments


def place_of_script(words: list[str]) -> int | None:
    """Return where a Python's own options end in its command line: the place of the script, or of `-m`."""
    place = 1
    while place < len(words):
        if words[place] in WITH_VALUE:
            place += 2
        elif words[place].startswith("-") and words[place] != "-m":
            place += 1
        else:
            return place
    return None
