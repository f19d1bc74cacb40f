"""The keeper of a node: a small process that holds memory files, so that they outlive the trainers that write them.

It hands the descriptor of a file to whoever asks for its name, over an abstract Unix socket, which has no file and goes
with the process. It maps no file itself. Only processes of the same user are served, and the socket's name has the
job's. A file goes when its rank asks for another size, when the job has fewer ranks, when no rank has been connected
for `idle_seconds`, and with the keeper. No torch here: it takes some 30 MB.
"""

import json
import os
import selectors
import socket
import struct
import time
import weakref
from typing import Any

from bridge_fgo.config import readable

VARIABLE = "BRIDGE_FGO_KEEPER"  # environment variable with the name of the job's keepers
PATIENCE = 60.0  # seconds to wait for the process that a rank was before: the driver frees a killed one's GPU first
_MESSAGE_BYTES = 1 << 16


def job_name() -> str:
    """Return the name of this job's keepers; empty where nothing names one."""
    return os.environ.get(VARIABLE, "")


def _address(job: str) -> str:
    return f"\0bridge_fgo.keeper.{os.getuid()}.{job}"


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process at the other end, 0 where it is in another PID namespace, and its user."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[:2]


class Keeper:
    """Serves the files; ValueError where the job has a keeper on this node already."""

    def __init__(self, job: str, limit_bytes: float, idle_seconds: float) -> None:
        self._limit, self._idle_seconds = limit_bytes, idle_seconds
        self._files: dict[str, int] = {}  # descriptors by name, "RANK/..."
        self._ranks: dict[socket.socket, tuple[int, int]] = {}  # of each connection the process, and its rank or -1
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._server.bind(_address(job))
        except OSError as error:
            raise ValueError(f"there is a keeper of job {job!r} on this node already ({error})") from error
        self._server.listen(socket.SOMAXCONN)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)

    def serve(self, end: int | None = None) -> None:
        """Serve until a descriptor can be read (`pidfd_open` of a process); without one until the keeper is idle."""
        if end is not None:
            self._selector.register(end, selectors.EVENT_READ)
        used = time.monotonic()  # when a rank was connected last
        while True:
            for key, _ in self._selector.select(timeout=1.0):
                if key.fd == end:
                    self._selector.unregister(key.fileobj)
                    return
                self._accept() if key.fileobj is self._server else self._answer(key.fileobj)
            if self._ranks:
                used = time.monotonic()
            elif time.monotonic() - used > self._idle_seconds:
                self._drop(list(self._files))
                if end is None:
                    return

    def close(self) -> None:
        """Free the memory that no trainer has mapped, and serve no more."""
        self._drop(list(self._files))
        for each in (*self._ranks, self._server, self._selector):
            each.close()

    def _accept(self) -> None:
        connection, _ = self._server.accept()
        pid, uid = _peer(connection)
        if uid != os.getuid():
            connection.close()
            return
        self._ranks[connection] = pid, -1
        self._selector.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: Any) -> None:
        try:
            if message := connection.recv(_MESSAGE_BYTES):
                answer, files = self._do(connection, json.loads(message))
                socket.send_fds(connection, [json.dumps(answer).encode()], files)
                return
        except (OSError, ValueError, KeyError):  # it has died, or does not speak this
            pass
        self._selector.unregister(connection)
        del self._ranks[connection]
        connection.close()

    def _do(self, connection: socket.socket, asked: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        pid, rank = self._ranks[connection][0], int(asked["rank"])
        if "ranks" in asked:
            busy = [of for each, of in self._ranks.items() if each is not connection and of[0] != pid and of[1] == rank]
            if busy:
                return {"busy": busy[0][0]}, []
            self._ranks[connection] = pid, rank
            self._drop([name for name in self._files if int(name.partition("/")[0]) >= asked["ranks"]])
            return {}, []
        name, nbytes = f"{rank}/{asked['name']}", asked["nbytes"]
        file = self._files.get(name)
        if file is not None and nbytes in (None, os.fstat(file).st_size):
            return {"was_there": True}, [file]
        self._drop([name])
        needed = nbytes or 0
        if self._held() + needed > self._limit:  # other ranks may have run on this node before
            here = {of for _, of in self._ranks.values()}
            self._drop([name for name in self._files if int(name.partition("/")[0]) not in here])
        if (held := self._held()) + needed > self._limit:
            may = f"the keeper may hold {readable(int(self._limit))} and holds {readable(held)}"
            return {"refusal": f"{may}, and this rank needs {readable(needed)}: raise its --memory-gib"}, []
        self._files[name] = file = os.memfd_create("bridge_fgo_kept")
        os.ftruncate(file, needed)
        return {"was_there": False}, [file]

    def _held(self) -> int:
        return sum(os.fstat(file).st_size for file in self._files.values())

    def _drop(self, names: list[str]) -> None:
        for name in names:
            if (file := self._files.pop(name, None)) is not None:
                os.close(file)


class KeeperLine:
    """A rank's line to its node's keeper, open as long as anything refers to it.

    Raises:
        OSError: nobody keeps, another user's process does, or the process that the rank was before does not end.
    """

    def __init__(self, job: str, rank: int, ranks: int) -> None:
        self._rank = rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        weakref.finalize(self, self._socket.close).atexit = False  # until its end the process may write the memory
        close = weakref.WeakMethod(self._socket.close)
        # Else a worker of a dead rank would be taken for it.
        os.register_at_fork(after_in_child=lambda: (close() or int)())
        self._socket.connect(_address(job))
        if (uid := _peer(self._socket)[1]) != os.getuid():
            raise PermissionError(f"it is of user {uid}, and this process of {os.getuid()}")
        end = time.monotonic() + PATIENCE
        while (pid := self._ask(ranks=ranks)[0].get("busy")) is not None:
            if time.monotonic() > end:
                raise TimeoutError(f"the process {pid} of an earlier start still runs, and may write this memory")
            time.sleep(0.1)

    def _ask(self, **asked: Any) -> tuple[dict[str, Any], list[int]]:
        self._socket.send(json.dumps({"rank": self._rank, **asked}).encode())
        message, files, *_ = socket.recv_fds(self._socket, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not message:
            raise ConnectionResetError("it has ended, or is of another user")
        return json.loads(message), list(files)

    def file(self, name: str, nbytes: int | None = None) -> tuple[int, bool]:
        """Return a descriptor of this rank's file of that name, and whether it was there before.

        One of another size than `nbytes` is replaced; None is any size. MemoryError where the keeper may hold no more.
        """
        answer, files = self._ask(name=name, nbytes=nbytes)
        if "refusal" in answer:
            raise MemoryError(answer["refusal"])
        return files[0], answer["was_there"]

    def is_alive(self) -> bool:
        """Return whether the keeper lives, without a wait."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False
