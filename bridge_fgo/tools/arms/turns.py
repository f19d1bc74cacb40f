"""Turns: arms of which all processes are alive at once train one after another on the same GPUs.

The turnstile runs in the process that started the arms. Every rank of an arm connects to the arm's own Unix socket,
asks for a turn before its first step, and blocks until it gets one. It asks again when the steps of its turn are done
and its GPU has come to rest, so that one message says both: the turn is over, and the next is awaited. All ranks of an
arm get their turn together, since a rank may wait in a collective for another one.

A message is a line of JSON: `{"rank": 0, "ranks": 2}` from a rank, and to it `{"turn": 3, "steps": 5, "ends_early":
false}`.
Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import selectors
import socket
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

MESSAGE_BYTES = 4096
WARM_UP = 0
"""Number of the turn that does not count."""


class TurnTaker:
    """A rank's side of the turnstile.

    Args:
        address: path of the arm's socket.
        rank: this process's, of `ranks`.

    Raises:
        OSError: nobody listens there.
    """

    def __init__(self, address: Path, rank: int, ranks: int) -> None:
        self._hello = json.dumps({"rank": rank, "ranks": ranks}) + "\n"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(address))
        self._lines = self._socket.makefile()
        self._left: float = 0
        self.turn: int | None = None
        """Number of the current turn; None before the first."""
        self.ends_early = False
        """Whether the arm is to leave out what steps it has left, but for one."""

    def has_another_step(self) -> bool:
        """Count one step of the current turn; False where the turn is over, or none has begun."""
        if self._left <= 0:
            return False
        self._left -= 1
        return True

    def take(self) -> None:
        """Give the current turn back and wait for the next one, whose first step is counted already.

        Raises:
            ConnectionError: whoever gives the turns is gone.
        """
        self._socket.sendall(self._hello.encode())
        line = self._lines.readline()
        if not line:
            raise ConnectionError("the bench that gives this arm its turns has ended")
        granted = json.loads(line)
        self.turn = granted["turn"]
        self._left = math.inf if granted["steps"] is None else granted["steps"] - 1
        self.ends_early = granted["ends_early"]


@dataclass
class _Arm:
    address: Path
    ranks: int | None = None
    waiting: dict[int, socket.socket] = field(default_factory=dict)


class Turnstile:
    """Grants turns to arms; a context manager, after which its sockets are gone."""

    def __init__(self) -> None:
        # Its permissions keep others out; and the path of a socket may have 107 bytes only.
        self._folder = TemporaryDirectory(prefix="turns.")
        self._selector = selectors.DefaultSelector()
        self._arms: dict[str, _Arm] = {}

    def __enter__(self) -> Turnstile:
        return self

    def __exit__(self, *error: Any) -> None:
        for key in list(self._selector.get_map().values()):
            self._drop(key.fileobj)
        self._selector.close()
        self._folder.cleanup()

    def add(self, name: str) -> Path:
        """Return the address at which the ranks of a new arm ask for their turns."""
        address = Path(self._folder.name) / str(len(self._arms))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(address))
        listener.listen()
        self._arms[name] = _Arm(address)
        self._selector.register(listener, selectors.EVENT_READ, (name, None))
        return address

    def poll(self, timeout: float) -> None:
        """Read what ranks have said; wait up to `timeout` seconds for it."""
        for key, _ in self._selector.select(timeout):
            name, said = key.data
            if said is None:
                connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                self._selector.register(connection, selectors.EVENT_READ, (name, bytearray()))
                continue
            try:
                received = key.fileobj.recv(MESSAGE_BYTES)  # type: ignore[union-attr]
            except ConnectionResetError:
                received = b""
            if not received:
                self._drop(key.fileobj)
                continue
            said += received
            if said.endswith(b"\n"):
                hello = json.loads(said)
                said.clear()
                arm = self._arms[name]
                arm.ranks = hello["ranks"]
                arm.waiting[hello["rank"]] = key.fileobj  # type: ignore[assignment]

    def is_waiting(self, name: str) -> bool:
        """Return whether all ranks of an arm wait for a turn."""
        arm = self._arms[name]
        return len(arm.waiting) == arm.ranks

    def grant(self, name: str, turn: int, steps: int | None, ends_early: bool = False) -> None:
        """Give a waiting arm its turn.

        Args:
            name: of the arm.
            turn: number of the turn.
            steps: after which it has to ask again; None for all that are left.
            ends_early: whether of these it is to train one alone.
        """
        arm = self._arms[name]
        assert self.is_waiting(name), name
        line = json.dumps({"turn": turn, "steps": steps, "ends_early": ends_early}) + "\n"
        for connection in arm.waiting.values():
            try:
                connection.sendall(line.encode())
            except (BrokenPipeError, ConnectionResetError):
                continue  # the rank has died: its arm's process ends, which the one that started it sees
        arm.waiting.clear()

    def _drop(self, connection: Any) -> None:
        self._selector.unregister(connection)
        connection.close()
        for arm in self._arms.values():
            arm.waiting = {rank: waiting for rank, waiting in arm.waiting.items() if waiting is not connection}
