"""Python programs that are forked from a process which has their imports: what a case pays for is the case.

    python forked.py [--te-shapes] MODULE...

It imports the modules, reads requests, a line of JSON each, and forks a child for each. The child has the caller's
environment and folder, and runs a module or a script as `python -m` and `python` do. The processes of `children` will
not do: they have another stand-in of Transformer Engine, and multiprocessing has one fork server.
"""

import json
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

BUILDER = "bridge_fgo.tools.job.builder"
OF_BUILDER = (
    "megatron.bridge.recipes",
    "megatron.bridge.training.pretrain",
    "megatron.bridge.training.utils.theoretical_memory_utils",
    "torch.testing._internal.distributed.fake_pg",
    "frozen",
)
ON_THE_PATH = ("PYTHONPATH", "PATH", "HOME")
"""Variables of which another value may find another Megatron."""

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Forked:
    """Runs Python programs as `subprocess.run` does, in children of one process that has imported some modules."""

    def __init__(self, *imports: str) -> None:
        self._imports = imports
        self._process: subprocess.Popen[str] | None = None
        self.answers = 0
        self.imported: set[str] = set()
        """Modules that the newest child has imported beside those."""

    def run(self, command: list[str], cwd: object = None, env: dict | None = None, **_) -> subprocess.CompletedProcess:
        """Run a command that begins with this Python, and capture what it prints."""
        if self._process is None:
            # One thread: a child has none but the one that forks. One seed: `answers` has sets ordered alike too.
            environment = os.environ | dict.fromkeys(ONE_THREAD, "1") | {"PYTHONHASHSEED": "0"}
            self._process = subprocess.Popen(
                [sys.executable, __file__, *self._imports],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        with TemporaryDirectory() as folder:
            files = [str(Path(folder) / name) for name in ("out", "err", "imported")]
            asked = {"program": command[1:], "environment": dict(os.environ if env is None else env), "files": files}
            self._process.stdin.write(json.dumps(asked | {"folder": str(cwd or Path.cwd())}) + "\n")
            self._process.stdin.flush()
            status = int(self._process.stdout.readline())
            self.answers += 1
            out, err, imported = (Path(file).read_text() for file in files)
        self.imported = set(imported.split())
        return subprocess.CompletedProcess(command, status, out, err)

    def close(self) -> None:
        """End the process that forks."""
        if self._process is not None:
            self._process.communicate()


class ForkedBuilder(Forked):
    """Takes the place of `subprocess.run` for the model builder, and leaves other commands to it."""

    def __init__(self) -> None:
        super().__init__("--te-shapes", *OF_BUILDER)
        self._environment = {name: os.environ.get(name) for name in ON_THE_PATH}

    def run(self, command: list[str], **options) -> subprocess.CompletedProcess[str]:
        """Do as `subprocess.run`; a builder that another environment could find other packages for is a new process."""
        here = {name: os.environ.get(name) for name in ON_THE_PATH}
        if command[:3] != [sys.executable, "-m", BUILDER] or here != self._environment:
            return subprocess.run(command, **options)
        return super().run(command)


def answer(asked: dict) -> None:
    """Run a program with the caller's environment and folder; what it prints goes to the first two files."""
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    for number, file in enumerate(asked["files"][:2], start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    is_module = asked["program"][0] == "-m"
    sys.argv = asked["program"][is_module:]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [asked["folder"] if is_module else str(Path(sys.argv[0]).parent), *filter(None, given)]
    run = runpy.run_module if is_module else runpy.run_path
    run(sys.argv[0], run_name="__main__")


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
    """Answer, and end this process as the program ends."""
    status = status_of(asked)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main(te_shapes: bool, *modules: str) -> None:
    """Fork a child for each request, and print how it ended."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, sys.path[0])  # the first is the program's
    if te_shapes:
        from bridge_fgo.tools.standins import te_shapes as standin

        standin.install()
        standin.install = lambda: None  # it is, before Megatron is imported
    for module in modules:
        __import__(module)
    warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # by jemalloc in pyarrow, which minds forks
    before = set(sys.modules)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            asked, status = json.loads(line), 1
            try:
                status = status_of(asked)
            finally:
                Path(asked["files"][2]).write_text("\n".join(sys.modules.keys() - before))
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        replies.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        replies.flush()
    os._exit(0)  # Python takes five seconds to take down what was imported


if __name__ == "__main__":
    main("--te-shapes" in sys.argv, *(word for word in sys.argv[1:] if word != "--te-shapes"))
