"""Turns: arms of which all processes are alive at once train one after another on the same GPUs.

A turnstile for each arm is in the process that started the arms. Every rank of an arm connects to its Unix socket, asks
for a turn before its first step, and blocks until it gets one. It asks again when the steps of its turn are done and
its GPU has come to rest, so that one message says both: the turn is over, and the next is awaited. All ranks of an arm
get their turn together, since a rank may wait in a collective for another one.
"""

from __future__ import annotations

import math
import socket
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path

WARM_UP = 0  # number of the turn that does not count


class TurnTaker:
    """A rank's side of the turnstile at `address`, of an arm with so many ranks; OSError where nobody listens there."""

    def __init__(self, address: Path, ranks: int) -> None:
        self._ranks = ranks
        self._connection = Client(str(address), "AF_UNIX")
        self._left: float = 0
        self.turn: int | None = None  # number of the current turn; None before the first

    def has_another_step(self) -> bool:
        """Count one step of the current turn; False where the turn is over, or none has begun."""
        if self._left <= 0:
            return False
        self._left -= 1
        return True

    def take(self) -> None:
        """Give the turn back and wait for the next, its first step counted; ConnectionError where nobody gives one."""
        self._connection.send(self._ranks)
        try:
            self.turn, steps = self._connection.recv()
        except EOFError:
            raise ConnectionError("the bench that gives this arm its turns has ended") from None
        self._left = math.inf if steps is None else steps - 1


class Turnstile:
    """Grants an arm its turns. `address` is the path of its socket, of at most 107 bytes; `close` it."""

    def __init__(self, address: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen()
        self._ranks: int | None = None
        self._connected: list[Connection] = []
        self._waiting: set[Connection] = set()  # ranks that wait for a turn, by their connections

    def close(self) -> None:
        """Close the socket: ranks that wait end with an error."""
        for each in (self._listener, *self._connected):
            each.close()

    def poll(self, timeout: float) -> None:
        """Read what ranks have said; wait up to `timeout` seconds for it."""
        for ready in wait([self._listener, *self._connected], timeout):
            if ready is self._listener:
                self._connected.append(Connection(self._listener.accept()[0].detach()))
                continue
            assert isinstance(ready, Connection)
            try:
                self._ranks = ready.recv()
                self._waiting.add(ready)
            except (EOFError, ConnectionResetError):  # the rank has ended
                self._connected.remove(ready)
                self._waiting.discard(ready)
                ready.close()

    @property
    def is_awaited(self) -> bool:
        """Whether all ranks of the arm wait for a turn."""
        return len(self._waiting) == self._ranks

    def grant(self, turn: int, steps: int | None) -> None:
        """Give the waiting arm its turn of so many steps; None for all that are left."""
        assert self.is_awaited
        for connection in self._waiting:
            try:
                connection.send((turn, steps))
            except (BrokenPipeError, ConnectionResetError):
                continue  # the rank has died: its arm's process ends, which the one that started it sees
        self._waiting.clear()
