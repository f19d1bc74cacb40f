"""The model builder's process, forked from one that has Megatron imported: an answer takes seconds.

    python forked_builder.py

It reads requests, a line of JSON each, and forks a child for each. The child has the caller's environment and folder,
and is what `python -m bridge_fgo.tools.job.builder REQUEST` is once that has imported Megatron. The processes of
`children` will not do: they have another stand-in of Transformer Engine, and multiprocessing has one fork server.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

MODULE = "bridge_fgo.tools.job.builder"
PRELOADED = (
    "megatron.bridge.recipes",
    "megatron.bridge.training.pretrain",
    "megatron.bridge.training.utils.theoretical_memory_utils",
    "torch.testing._internal.distributed.fake_pg",
    "frozen",
)
ON_THE_PATH = ("PYTHONPATH", "PATH", "HOME")
"""Variables of which another value may find another Megatron."""

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class ForkedBuilder:
    """Takes the place of `subprocess.run` for the builder, and leaves other commands to it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._environment = {name: os.environ.get(name) for name in ON_THE_PATH}
        self.answers = 0

    def run(self, command: list[str], **options) -> subprocess.CompletedProcess[str]:
        """Do as `subprocess.run`; a builder that another environment could find other packages for is a new process."""
        here = {name: os.environ.get(name) for name in ON_THE_PATH}
        if command[:3] != [sys.executable, "-m", MODULE] or here != self._environment:
            return subprocess.run(command, **options)
        if self._process is None:
            environment = os.environ | dict.fromkeys(ONE_THREAD, "1")  # a child has none but the one that forks
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        with TemporaryDirectory() as folder:
            files = [str(Path(folder) / name) for name in ("out", "err")]
            asked = {"command": command, "environment": dict(os.environ), "folder": str(Path.cwd()), "files": files}
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            status = int(self._process.stdout.readline())
            self.answers += 1
            out, err = (Path(file).read_text() for file in files)
        return subprocess.CompletedProcess(command, status, out, err)

    def close(self) -> None:
        """End the process that forks."""
        if self._process is not None:
            self._process.communicate()


def answer(asked: dict) -> None:
    """Run the builder on a request, with the caller's environment and folder; what it prints goes to the two files."""
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    for number, file in enumerate(asked["files"], start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from bridge_fgo.tools.standins import te_shapes

    te_shapes.install = lambda: None  # it was, before Megatron was imported
    sys.argv = asked["command"][2:]
    runpy.run_module(MODULE, run_name="__main__")


def main() -> None:
    """Fork a child for each request, and print how it ended."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from bridge_fgo.tools.standins import te_shapes

    te_shapes.install()
    for module in PRELOADED:
        __import__(module)
    warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # by jemalloc in pyarrow, which minds forks
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                answer(json.loads(line))
                status = 0
            except BaseException:  # as the interpreter would end
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        replies.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        replies.flush()
    os._exit(0)  # Python takes five seconds to take down what was imported


if __name__ == "__main__":
    main()
