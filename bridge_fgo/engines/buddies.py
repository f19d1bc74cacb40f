"""Copies finished steps of a rank to a rank of another node, its buddy, in a background thread.

A lost node takes with it what its keeper has. So each rank has a buddy, the rank with its place on the next node, and
is the buddy of its ward: `OffloadConfig(copies_to_buddy_every=K)`. Copies go by a gloo group of their own, which one
thread at a time uses; `engines.kept_steps` says which step is sent, and when.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

PATIENCE = 60.0  # seconds to wait for a round that was begun, as training ends or another one starts
_round: threading.Thread | None = None  # the newest of this process


def buddies(nodes: Sequence[str], every: int) -> list[int]:
    """Return the buddy of each rank, by the node of each; ValueError if not all nodes have as many ranks."""
    by_node = defaultdict[str, list[int]](list)
    for rank, node in enumerate(nodes):
        by_node[node].append(rank)
    first, *others = by_node.values()
    if not others or any(len(each) != len(first) for each in others):
        raise ValueError(
            f"OffloadConfig.copies_to_buddy_every={every}: it needs two nodes at least, with as many ranks each, and "
            f"those of this job have {[len(each) for each in (first, *others)]}: change the job, or set it to None"
        )
    return [buddy for _, buddy in sorted(zip(chain(first, *others), chain(*others, first), strict=True))]


def wait_for_round() -> bool:
    """Wait a while for the newest round of this process, if there was one; return whether it has ended."""
    if _round is not None:
        _round.join(PATIENCE)
    return _round is None or not _round.is_alive()


class Buddy:
    """Sends a rank's steps to its buddy, and gets those of its ward, in a round every so many steps.

    Made by all ranks together, of the node of each, and the layout and the bytes of its slabs. `warn` prints a line.
    """

    def __init__(self, ranks: Sequence[tuple[str, bytes, list[int]]], every: int, warn: Callable[[str], None]) -> None:
        self.of_all = buddies([node for node, *_ in ranks], every)
        self.rank = torch.distributed.get_rank()
        self.buddy, self.ward = self.of_all[self.rank], self.of_all.index(self.rank)
        _, self.layout_of_ward, self.sizes_of_ward = ranks[self.ward]
        self.every, self._warn = every, warn
        self.begun = self.whole = -1  # steps of the newest round, and of the newest that this rank has whole
        self._group: Any = torch.distributed.new_group(backend="gloo")
        self._sent: list[Any] = []

    def begin(self, step: int, act: Callable[[], None]) -> None:
        """Have a thread do the round of a step. If it fails, no rank begins another one."""
        global _round
        self.begun = step

        def run() -> None:
            try:
                act()
                self.whole = step
            except Exception as error:
                self._warn(f"no more steps are copied to another node, whose loss costs those since: {error}")

        _round = threading.Thread(target=run, daemon=True)
        _round.start()

    def send(self, to: int, payload: bytes, parts: Sequence[torch.Tensor]) -> None:
        """Begin to send bytes and tensors to a rank; the latter stay as they are until `finish`."""
        every = (torch.tensor([len(payload)]), torch.frombuffer(bytearray(payload), dtype=torch.uint8), *parts)
        self._sent = [torch.distributed.isend(each, to, self._group, tag) for tag, each in enumerate(every)]

    def receive(self, source: int, places: Sequence[torch.Tensor]) -> bytes:
        """Return the bytes that a rank sends; its tensors get their places."""
        torch.distributed.recv(size := torch.tensor([0]), source, self._group, 0)
        payload = torch.empty(int(size), dtype=torch.uint8)
        for tag, each in enumerate((payload, *places), 1):
            torch.distributed.recv(each, source, self._group, tag)
        return payload.numpy().tobytes()

    def finish(self) -> None:
        """Wait for what was sent."""
        for each in self._sent:
            each.wait()
