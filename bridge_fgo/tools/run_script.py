"""`bridge-fgo run`: an unmodified training script, with the package installed.

Torch and Megatron are imported by `run` only, never by importing this module.
"""

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import TracebackType
from typing import Any

EXECS = ("execv", "execve")  # functions of `os` that all others of `exec*` end in
WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of Python that the next word belongs to


@dataclass(frozen=True)
class Request:
    """A script to run, its arguments, and the package's settings."""

    script: Path  # a file, or with `module` the dotted name of a module, run as `python -m` runs it
    args: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)  # the arguments of `OffloadConfig` that the user gave
    module: bool = False
    offload: bool = False  # whether to set the offload flag in whatever config the script trains with


def prepare(request: Request) -> None:
    """Check a request before anything is patched; ValueError for no script, or what `install` will refuse."""
    if request.module:
        top = str(request.script).partition(".")[0]
        if not top or not _can_be_found(top):
            raise ValueError(f"-m {request.script}: there is no module {top!r}")
    elif not request.script.is_file():
        raise ValueError(f"there is no script {str(request.script)!r}")
    import bridge_fgo
    from bridge_fgo.bridge.framework_names import require_environment

    bridge_fgo.OffloadConfig(**request.config)
    require_environment()


def _can_be_found(module: str) -> bool:
    """Return whether a top-level module can be found as `python -m` does, from the working folder first."""
    here = "" if sys.flags.safe_path else os.getcwd()
    return bool(PathFinder.find_spec(module, [here, *sys.path]) or module in sys.builtin_module_names)


def run(request: Request) -> None:
    """Install the package and run the script as `python SCRIPT ARGS...` or `python -m MODULE ARGS...` would.

    The script sees its own `sys.argv`, its folder (of a module: the working folder) as `sys.path[0]`, which stay as it
    leaves them for its threads and exit handlers, and `__name__ == "__main__"`. Whatever it raises, SystemExit
    included, passes through; a traceback begins at the script.
    """
    import bridge_fgo
    from bridge_fgo.bridge import settings
    from bridge_fgo.tools.options import command_line

    bridge_fgo.install(bridge_fgo.OffloadConfig(**request.config))
    script = request.script if request.module else request.script.resolve()  # it may change the working folder
    options = [*(["--offload"] if request.offload else []), *command_line(request.config)]
    keep_in_front(script, request.module, options)
    measures = bool(request.config.get("measure"))  # a run without the offload on purpose
    if request.offload:
        settings.caller.sets_flag = True
    sys.argv = [str(request.script), *request.args]
    if not sys.flags.safe_path:  # under `python -P` the script's folder is not added either
        # Python resolves symbolic links here, so that a linked script finds its neighbours.
        sys.path[0] = os.getcwd() if request.module else os.path.dirname(os.path.realpath(request.script))
    sys.excepthook = partial(_show_from_the_script, sys.excepthook)
    try:
        if request.module:
            runpy.run_module(str(request.script), run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(request.script), run_name="__main__")
    except SystemExit as end:
        if end.code in (None, 0):
            _say_if_never_set(settings.caller.saw_flag or measures, request)
        raise
    _say_if_never_set(settings.caller.saw_flag or measures, request)


def _say_if_never_set(is_as_meant: bool, request: Request) -> None:
    """Say on the first rank that nothing was offloaded, and how it would have been."""
    why = "no config of Megatron-Bridge had optimizer.offload_optimizer_states=True; set it there, or give --offload"
    why = f"{request.script} trained with no config of Megatron-Bridge" if request.offload else f"{why} before SCRIPT"
    if not is_as_meant and os.environ.get("RANK", "0") == "0":
        print(f"bridge-fgo run: nothing was offloaded: {why}", file=sys.stderr)


def _show_from_the_script(
    show: Callable[..., None], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show an uncaught error without the frames that led to the script: this package's, click's and runpy's."""
    frames, frame = None, trace
    while frame is not None:
        # The last of runpy's is the script's: under `python -m bridge_fgo` it runs this package too.
        if frame.tb_frame.f_code.co_name == "_run_code" and frame.tb_frame.f_globals.get("__name__") == "runpy":
            frames = frame.tb_next
        frame = frame.tb_next
    # Without any the script did not even begin (a syntax error): all of it is shown.
    show(kind, error if frames is None else error.with_traceback(frames), frames or trace)


def keep_in_front(script: Path, is_module: bool, options: Sequence[str]) -> None:
    """Have this process, where it replaces itself by the same script, run that by `bridge-fgo run` again.

    Megatron-Bridge's own `scripts/training/run_recipe.py` sets its recipe's environment and calls
    `os.execvpe(sys.executable, [sys.executable, SCRIPT, ...])`: in the new process the package would not be installed,
    and the flag would be an unknown override, or on an mcore that has it a silent no-op. `options` are of `bridge-fgo
    run`.
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
