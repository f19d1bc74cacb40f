"""Which rank of another node has a copy of a rank's steps, and the thread that sends it there.

Ranks of a node lose what their keeper has if the node is lost. So each has a buddy, the rank with its place on the next
node, and is the buddy of its ward on the node before: `OffloadConfig(copies_to_buddy_every=K)`. `engines.kept_steps`
says which step is sent, and when. Copies go by a gloo group of their own, which only one thread uses at a time.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

PATIENCE = 60.0
"""Seconds to wait, where training has ended, for a round that was begun."""

_round: threading.Thread | None = None  # the newest of this process


def buddies(nodes: Sequence[str], every: int) -> list[int]:
    """Return the buddy of each rank, by the node of each; ValueError where nodes do not have as many ranks."""
    ranks = defaultdict[str, list[int]](list)
    for rank, node in enumerate(nodes):
        ranks[node].append(rank)
    if len(ranks) < 2 or len({len(each) for each in ranks.values()}) > 1:
        numbers = ", ".join(str(len(each)) for each in ranks.values())
        raise ValueError(
            f"OffloadConfig.copies_to_buddy_every={every}: it needs two nodes at least, with as many ranks each, and "
            f"those of this job have {numbers}: change the job, or set it to None"
        )
    first, *others = ranks.values()
    ahead = dict(zip(chain(first, *others), chain(*others, first), strict=True))
    return [ahead[rank] for rank in range(len(nodes))]


def end_newest_round() -> None:
    """Wait for the thread of an earlier training of this process; TimeoutError where it does not end."""
    if _round is not None:
        _round.join(PATIENCE)
        if _round.is_alive():
            raise TimeoutError("the copy of a step to another node has not ended, which an earlier training began")


class Buddy:
    """Sends a rank's steps to its buddy, and gets those of its ward. Made by all ranks together.

    Args:
        ahead: the buddy of each rank.
        every: steps from one round to the next.
        whole: step of the newest round that all ranks have; -1 if there is none.
        warn: prints a line.
    """

    def __init__(self, ahead: Sequence[int], every: int, whole: int, warn: Callable[[str], None]) -> None:
        self.rank = torch.distributed.get_rank()
        self.ahead, self.ward = ahead[self.rank], ahead.index(self.rank)
        self.every, self._warn = every, warn
        self.begun = self.whole = whole  # steps of the newest rounds
        self.is_over = False
        self._group: Any = torch.distributed.new_group(backend="gloo")

    def begin(self, step: int, act: Callable[[], None]) -> None:
        """Have a thread do the round of a step; training does not wait for it, nor ends if it fails."""
        global _round
        self.begun = step

        def run() -> None:
            try:
                act()
            except Exception as error:
                self._warn(f"steps are copied to other nodes no more, so that to lose one costs a checkpoint: {error}")
            else:
                self.whole = step

        _round = threading.Thread(target=run, daemon=True)
        _round.start()

    def end(self) -> None:
        """Wait a while for the round that was begun; what it gets later is not taken."""
        try:
            end_newest_round()
        except TimeoutError:
            self.is_over = True

    def swap(self, to: int, parts: Sequence[torch.Tensor], source: int | None, places: Sequence[torch.Tensor]) -> bytes:
        """Send parts to a rank, and get another's: return the bytes of its first part; the rest is in `places`."""
        size = torch.tensor([part.numel() for part in parts[:1]])
        sent = [
            torch.distributed.isend(each, to, self._group, tag)
            for tag, each in enumerate((size, *parts) if parts else ())
        ]
        first = torch.empty(0, dtype=torch.uint8)
        if source is not None:
            size = torch.zeros(1, dtype=torch.int64)
            torch.distributed.recv(size, source, self._group, 0)
            first = torch.empty(int(size), dtype=torch.uint8)
            for tag, each in enumerate((first, *places), 1):
                torch.distributed.recv(each, source, self._group, tag)
        for each in sent:
            if each is not None:
                each.wait()
        return first.numpy().tobytes()
