"""Turns: arms of which all processes are alive at once train one after another on the same GPUs.

The turnstile runs in the process that started the arms. Every rank of an arm connects to the arm's own Unix socket,
asks for a turn before its first step, and blocks until it gets one. It asks again when the steps of its turn are done
and its GPU has come to rest, so that one message says both: the turn is over, and the next is awaited. All ranks of an
arm get their turn together, since a rank may wait in a collective for another one.

Nothing here imports torch.
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

WARM_UP = 0
"""Number of the turn that does not count."""


class TurnTaker:
    """A rank's side of the turnstile; `address` is the path of the arm's socket.

    Raises:
        OSError: nobody listens there.
    """

    def __init__(self, address: Path, rank: int, ranks: int) -> None:
        self._asks = (rank, ranks)
        self._connection = Client(str(address), "AF_UNIX")
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
        self._connection.send(self._asks)
        try:
            self.turn, steps, self.ends_early = self._connection.recv()
        except EOFError:
            raise ConnectionError("the bench that gives this arm its turns has ended") from None
        self._left = math.inf if steps is None else steps - 1


@dataclass
class _Arm:
    listener: socket.socket
    ranks: int | None = None
    connected: list[Connection] = field(default_factory=list)
    waiting: dict[Connection, int] = field(default_factory=dict)
    """Ranks that wait for a turn, by their connections."""


class Turnstile:
    """Grants turns to arms; a context manager, after which its sockets are gone."""

    def __init__(self) -> None:
        # Its permissions keep others out; and the path of a socket may have 107 bytes only.
        self._folder = TemporaryDirectory(prefix="turns.")
        self._arms: dict[str, _Arm] = {}

    def __enter__(self) -> Turnstile:
        return self

    def __exit__(self, *error: Any) -> None:
        for arm in self._arms.values():
            for each in (arm.listener, *arm.connected):
                each.close()
        self._folder.cleanup()

    def add(self, name: str) -> Path:
        """Return the address at which the ranks of a new arm ask for their turns."""
        address = Path(self._folder.name) / str(len(self._arms))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(address))
        listener.listen()
        self._arms[name] = _Arm(listener)
        return address

    def poll(self, timeout: float) -> None:
        """Read what ranks have said; wait up to `timeout` seconds for it."""
        owners: dict[Any, _Arm] = {each: arm for arm in self._arms.values() for each in (arm.listener, *arm.connected)}
        for ready in wait(list(owners), timeout):
            arm = owners[ready]
            if ready is arm.listener:
                arm.connected.append(Connection(arm.listener.accept()[0].detach()))
                continue
            assert isinstance(ready, Connection)
            try:
                arm.waiting[ready], arm.ranks = ready.recv()
            except (EOFError, ConnectionResetError):  # the rank has ended
                arm.connected.remove(ready)
                arm.waiting.pop(ready, None)
                ready.close()

    def is_waiting(self, name: str) -> bool:
        """Return whether all ranks of an arm wait for a turn."""
        arm = self._arms[name]
        return len(arm.waiting) == arm.ranks

    def grant(self, name: str, turn: int, steps: int | None, ends_early: bool = False) -> None:
        """Give a waiting arm its turn of so many steps; None for all that are left, `ends_early` for one of these."""
        assert self.is_waiting(name), name
        for connection in self._arms[name].waiting:
            try:
                connection.send((turn, steps, ends_early))
            except (BrokenPipeError, ConnectionResetError):
                continue  # the rank has died: its arm's process ends, which the one that started it sees
        self._arms[name].waiting.clear()
