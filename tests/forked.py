"""Processes of tests that have their imports already, because they are forked: what a case pays for is the case."""

import contextlib
import math
import multiprocessing
import multiprocessing.util
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import pytest

from bridge_fgo.recipes.process import ATTENTION_VARIABLES
from bridge_fgo.tools.link import launcher
from harness.arms.runner import POLL_SECONDS

PATIENCE = 300
"""Seconds after which something hangs: what takes some five may import Megatron first, on a busy machine."""

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

BUILDER = "bridge_fgo.tools.job.builder"
OF_BUILDER = (
    "megatron.bridge.recipes",
    "megatron.bridge.training.pretrain",
    "megatron.bridge.training.utils.theoretical_memory_utils",
    "torch.testing._internal.distributed.fake_pg",
    "frozen",
)


class Server:
    """A process that imports modules when it is first asked for a child, and then forks one for each that is.

    It has one thread: a child has none but the one that forks. It has one seed, so that sets are ordered alike.
    """

    def __init__(self, *modules: str, server: forkserver.ForkServer | None = None) -> None:
        self._server = server or forkserver.ForkServer()
        # The first because each child runs the file of the main program, which may be pytest's.
        self._server.set_forkserver_preload(["pytest", *modules])

    @contextlib.contextmanager
    def running(self) -> Iterator[multiprocessing.context.ForkServerContext]:
        """A context of multiprocessing whose processes are forked from this one."""
        with pytest.MonkeyPatch.context() as patch:  # of the environment for the first call, which starts it
            patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
            for name, value in {**dict.fromkeys(ONE_THREAD, "1"), "PYTHONHASHSEED": "0"}.items():
                patch.setenv(name, value)
            for name in ATTENTION_VARIABLES:  # of a model that an earlier test built
                patch.delenv(name, raising=False)
            for name in ("ensure_running", "get_inherited_fds", "connect_to_new_process"):
                patch.setattr(forkserver, name, getattr(self._server, name))
            forkserver.ensure_running()
            yield multiprocessing.get_context("forkserver")

    def start(self, target, *args) -> multiprocessing.Process:
        """Start `target(*args)`, a function of a module, in a child."""
        with self.running() as context:
            child = context.Process(target=target, args=args)
            child.start()
        return child

    def run(self, command, cwd=None, env=None, **_) -> subprocess.CompletedProcess:
        """Do as `subprocess.run` does with a command that begins with this Python, in a child; capture what it prints.

        The result has also the names of all modules that the child has `imported`.
        """
        with contextlib.ExitStack() as stack:
            out, err, imported = (stack.enter_context(tempfile.NamedTemporaryFile("r")) for _ in range(3))
            status = join(Program(self, command, out, err, env, cwd, imported.name)._child, f"as {command}")
            done = subprocess.CompletedProcess(command, status, out.read(), err.read())
            vars(done)["imported"] = set(imported.read().split())
            return done


class Program:
    """A Python program in a child, as `subprocess.Popen` of a command that begins with this Python."""

    def __init__(self, server, command, stdout, stderr=None, env=None, cwd=None, imported=os.devnull, **_) -> None:
        files = [stdout.name, (stderr if hasattr(stderr, "name") else stdout).name]
        asked = {"program": [str(word) for word in command[1:]], "files": files, "imported": imported}
        asked |= {"environment": dict(os.environ if env is None else env), "folder": str(cwd or Path.cwd())}
        self._child = server.start(end_as, asked)

    returncode = property(lambda self: self._child.exitcode)

    def wait(self, timeout: float | None = None) -> int | None:
        self._child.join(timeout)
        return self.returncode

    def poll(self) -> int | None:
        return self.wait(0)

    def terminate(self) -> None:
        self._child.terminate()

    def kill(self) -> None:
        self._child.kill()


class LaunchedRanks:
    """The processes that `link.launcher` starts, as `subprocess.Popen` of its command: all end when one fails."""

    def __init__(self, server: Server, command: list[str], env: dict[str, str], **options) -> None:
        python, *words = command
        several: list[dict[str, str]] = [{}]
        if (begin := [*launcher(2)[:-1]]) == words[: len(begin)]:
            ranks, *words = words[len(begin) :]
            several = self._told_by_torchrun(int(ranks))
        self._programs = [Program(server, [python, *words], env=env | rank, **options) for rank in several]
        self._failed = 0  # status of the rank that failed first
        self.returncode: int | None = None

    def _told_by_torchrun(self, ranks: int) -> list[dict[str, str]]:
        """Return the environment that torchrun gives to each rank, with a store in this process, as there."""
        import torch

        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        common |= {"TORCHELASTIC_RESTART_COUNT": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        each = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
        return [{name: str(value) for name, value in of_rank.items()} for of_rank in each]

    def poll(self) -> int | None:
        ended = [program.poll() for program in self._programs]
        self._failed = self._failed or next(filter(None, ended), 0)
        if None not in ended:
            self.returncode = self._failed
        elif self._failed:
            self.kill()
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("ranks", timeout)
            time.sleep(POLL_SECONDS)
        return status

    def kill(self) -> None:
        for program in self._programs:
            program.kill()

    terminate = kill  # one that waits in a collective for a rank that has ended takes no other signal


def join(child, what: str) -> int:
    """Return the child's exit status, negative where a signal ended it; fail the test after PATIENCE."""
    child.join(PATIENCE)
    if child.exitcode is None:
        child.kill()
        pytest.fail(f"a child hung {what}")
    return child.exitcode


class ForkedBuilder:
    """Takes the place of `subprocess` for the model builder, and leaves other commands to it."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self) -> None:
        self._server, self._paths = Server("te_shapes_installed", *OF_BUILDER), self._found_by()
        self.answers = 0

    @staticmethod
    def _found_by() -> list[str | None]:
        """Return the variables of which another value may find another Megatron."""
        return [os.environ.get(name) for name in ("PYTHONPATH", "PATH", "HOME")]

    def run(self, command: list[str], **options) -> subprocess.CompletedProcess[str]:
        """Do as `subprocess.run`; a builder that another environment could find other packages for is a new process."""
        if command[:3] != [sys.executable, "-m", BUILDER] or self._found_by() != self._paths:
            return subprocess.run(command, **options)
        self.answers += 1
        return self._server.run(command, **options)


def answer(asked: dict) -> None:
    """Run a module or a script as `python -m` and `python` do, with the caller's environment and folder.

    What it prints goes to two files.
    """
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    for number, file in enumerate(asked["files"], start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    is_module = asked["program"][0] == "-m"
    sys.argv = asked["program"][is_module:]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [asked["folder"] if is_module else str(Path(sys.argv[0]).parent), *filter(None, given)]
    run = partial(runpy.run_module, alter_sys=True) if is_module else runpy.run_path
    run(sys.argv[0], run_name="__main__")  # what multiprocessing spawns from it looks for its functions there


def status_of(asked: dict) -> int:
    """Answer; return the status that the interpreter would end with, after it has printed what it would."""
    try:
        answer(asked)
    except SystemExit as exit:
        if not isinstance(exit.code, int | None):
            print(exit.code, file=sys.stderr)
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def end_as(asked: dict) -> None:
    """Answer, name the modules that are imported then in a file, and end this process as the program ends."""
    status = status_of(asked)
    Path(asked["imported"]).write_text("\n".join(sys.modules))
    sys.stdout.flush()
    sys.stderr.flush()
    multiprocessing.util._exit_function()  # ends what it has started, which would keep GPU memory
    os._exit(status)  # Python takes five seconds to take down what was imported
