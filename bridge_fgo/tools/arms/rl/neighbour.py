"""The other process of a shared GPU: takes memory that a sleep has given back, and fills it.

    python -m bridge_fgo.tools.arms.rl.neighbour --device cuda:0

Reads a number of bytes a line, takes and fills as many, and answers with how many they are; 0 gives all back. It fills
them with a number of its own each time, and finds that number in all of them before it gives them back. "crowd" has it
take what is free, but for some room, and keep it to the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOM = 2 * 2**30
"""Bytes that are left free for the trainer where the GPU is crowded: for what its allocator has not cached."""
LARGEST = 2**30
"""Bytes of a tensor: what is taken need not lie in one piece."""
OWN_BYTES = 4 * 2**20
"""Bytes that are not asked for: the driver gives memory in pages of 2 MiB, and some of a sleep's are shared."""


class Neighbour:
    """The second process as seen by the trainer. A context: the process ends with it.

    Args:
        device: "cuda:0" or another GPU, or "cpu".
    """

    def __init__(self, device: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--device", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ask(0)  # it has its CUDA context before anything is measured

    def take(self, nbytes: int) -> int:
        """Have it take and fill so many bytes; return how many it got.

        Raises:
            RuntimeError: it has not got them, or has ended.
        """
        return self._ask(max(0, nbytes - OWN_BYTES))

    def give_back(self) -> None:
        """Have it look at its bytes and give them back.

        Raises:
            RuntimeError: they are not what it had filled them with.
        """
        self._ask(0)

    def crowd(self) -> int:
        """Have it take what is free now, but for `ROOM`, and keep it; return how many bytes that is."""
        return self._ask("crowd")

    def _ask(self, what: int | str) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(what, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise RuntimeError(f"the second process, asked to hold {what} bytes: it has ended") from None
        answer = self._process.stdout.readline().strip()
        if not answer.isdigit():
            raise RuntimeError(f"the second process, asked to hold {what} bytes: {answer or 'it has ended'}")
        return int(answer)

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # where it has ended, what it has not read
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


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

        Raises:
            RuntimeError: somebody else has written into what was held; or there are not so many.
        """
        if any(not bool((tensor == self._number).all()) for tensor in self._held):
            raise RuntimeError("what it held was written by somebody else")
        self._held.clear()
        if self._device.type == "cuda":
            self._torch.cuda.empty_cache()
        self._number = self._number % 255 + 1
        self._fill(self._held, nbytes)
        return sum(tensor.numel() for tensor in self._held)

    def crowd(self) -> int:
        """Take what is free on the GPU, but for `ROOM`, and keep it; return the bytes."""
        free, _ = self._torch.cuda.mem_get_info(self._device)
        self._fill(self._kept, max(0, free - ROOM))
        return sum(tensor.numel() for tensor in self._kept)

    def _fill(self, tensors: list[torch.Tensor], nbytes: int) -> None:
        for start in range(0, nbytes, LARGEST):
            size = min(LARGEST, nbytes - start)
            tensors.append(self._torch.full((size,), self._number, dtype=self._torch.uint8, device=self._device))
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)


def main() -> None:
    """Serve until the standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    holder = Holder(parser.parse_args().device)
    for line in sys.stdin:
        try:
            print(holder.crowd() if line.strip() == "crowd" else holder.hold(int(line)), flush=True)
        except RuntimeError as error:  # torch.OutOfMemoryError too: the trainer says it, and ends
            print(str(error).splitlines()[0], flush=True)


if __name__ == "__main__":
    main()
