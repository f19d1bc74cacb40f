"""The other process of a shared GPU: takes memory that a sleep has given back, and fills it."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOM = 2 * 2**30  # left free for the trainer where the GPU is crowded: for what its allocator has not cached
LARGEST = 2**30  # bytes of a tensor: what is taken need not lie in one piece
OWN_BYTES = 4 * 2**20  # not asked for: the driver's pages are of 2 MiB, and some of a sleep's are shared


class Neighbour:
    """The second process on a device ("cuda:0", "cpu") as seen by the trainer. A context: the process ends with it.

    It fills what it takes with a number of its own each time, and finds that number in all of it before it gives the
    memory back.
    """

    def __init__(self, device: str) -> None:
        spawned = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawned.Pipe()
        self._process = spawned.Process(target=serve, args=(theirs, device), daemon=True)
        self._process.start()
        theirs.close()  # or nobody would see that the process has ended
        self._ask(0)  # it has its CUDA context before anything is measured

    def lend(self, nbytes: int) -> int:
        """Have it take, fill, check and give back so many bytes; return how many it got; RuntimeError if it did not."""
        held = self._ask(max(0, nbytes - OWN_BYTES))
        self._ask(0)
        return held

    def crowd(self) -> int:
        """Have it take what is free now, but for `ROOM`, and keep it; return how many bytes that is."""
        return self._ask("crowd")

    def _ask(self, what: int | str) -> int:
        answer: int | str = "it has ended"
        with suppress(EOFError, OSError):
            self._pipe.send(what)
            answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"the second process, asked to hold {what} bytes: {answer}")
        return answer

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, *error: Any) -> None:
        self._pipe.close()
        self._process.join(timeout=30)
        self._process.kill()
        self._process.join()


class Holder:
    """Memory that the second process holds."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch, self._device = torch, torch.device(device)
        self._held: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []
        self._number = 0
        torch.zeros(1, device=self._device)

    def hold(self, nbytes: int) -> int:
        """Give back what is held, then take and fill so many bytes; return how many are held.

        RuntimeError where somebody else has written into what was held; or there are not so many.
        """
        if any(not bool((tensor == self._number).all()) for tensor in self._held):
            raise RuntimeError("what it held was written by somebody else")
        self._held.clear()
        if self._device.type == "cuda":
            self._torch.cuda.empty_cache()
        self._number = self._number % 255 + 1
        return self._fill(self._held, nbytes)

    def crowd(self) -> int:
        """Take what is free on the GPU, but for `ROOM`, and keep it; return the bytes."""
        free, _ = self._torch.cuda.mem_get_info(self._device)
        return self._fill(self._kept, max(0, free - ROOM))

    def _fill(self, tensors: list[torch.Tensor], nbytes: int) -> int:
        for start in range(0, nbytes, LARGEST):
            size = min(LARGEST, nbytes - start)
            tensors.append(self._torch.full((size,), self._number, dtype=self._torch.uint8, device=self._device))
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)
        return sum(tensor.numel() for tensor in tensors)


def serve(pipe: Connection, device: str) -> None:
    """Hold as many bytes as each message says, or "crowd", until the trainer closes the pipe; answer how many."""
    holder = Holder(device)
    with suppress(EOFError):
        while True:
            what = pipe.recv()
            try:
                pipe.send(holder.crowd() if what == "crowd" else holder.hold(what))
            except RuntimeError as error:  # torch.OutOfMemoryError too: the trainer says it, and ends
                pipe.send(str(error).splitlines()[0])
