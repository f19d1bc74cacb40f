"""What drives mcore's own offloaders: one for each optimizer, with every state on the GPU for the optimizer step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, override

import torch

from bridge_fgo.engines.engine import Engine
from bridge_fgo.memory.host_memory import power_of_two_at_least
from bridge_fgo.memory.meters import Traffic
from bridge_fgo.memory.state import Bundle
from bridge_fgo.states.megatron import MegatronSource, live_bytes
from bridge_fgo.states.source import Source


class Member(ABC):
    """Drives the offloader that mcore built into one DistributedOptimizer. The verbs are those of an engine.

    Args:
        source: of the optimizer.
        traffic: counts what moves.
    """

    name: str
    """What the engine is called."""
    verbs: tuple[str, ...]
    """Methods by which a DistributedOptimizer class with upstream's offloader is known."""
    serves_saves = False
    """Whether mcore makes its state dictionaries of the host's copies, wherever the states are."""
    interrupted = ""
    """What came in the midst of a move; what upstream does itself is not watched."""

    def __init__(self, source: MegatronSource, traffic: Traffic) -> None:
        self.optimizer: Any = source.optimizer
        self.states: list[Bundle] = source.states()
        self.state_bytes = self.planned_bytes = sum(bundle.nbytes for bundle in self.states)
        self._home = source.device
        self._traffic = traffic
        self._away = 0

    @classmethod
    def is_available(cls, optimizer_class: type) -> bool:
        """Return whether a DistributedOptimizer class has the offloader's verbs."""
        return all(hasattr(optimizer_class, verb) for verb in cls.verbs)

    @abstractmethod
    def host_buffers(self) -> list[Any]:
        """Return upstream's page-locked host tensors."""

    def existing_bytes(self) -> int:
        """Return the bytes of the states that exist, wherever they are."""
        tensors = (state.read() for bundle in self.states for state in bundle.states)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def _bytes_off_gpu(self) -> int:
        return self.existing_bytes() - live_bytes(self.states, self._home)

    def _count_away(self) -> None:
        nbytes = self._bytes_off_gpu()
        self._traffic.out += nbytes
        self._traffic.release(nbytes - self._away)
        self._away = nbytes

    def _count_back(self, nbytes: int) -> None:
        self._traffic.back += nbytes
        self._traffic.released -= self._away
        self._away = 0

    @abstractmethod
    def offload(self) -> None:
        """Start the copy out."""

    @abstractmethod
    def release(self) -> None:
        """Give the GPU memory back, and count it."""

    @abstractmethod
    def reload(self) -> None:
        """Start the copy in, and count it."""

    @abstractmethod
    def require_readable(self) -> None:
        """Have work that the current stream gets from now on find the states readable."""

    @abstractmethod
    def require_writable(self) -> None:
        """Have work that the current stream gets from now on find the states readable and writable."""

    def settle(self) -> None:
        """End the moves of a training step."""
        self.require_readable()


class McoreEngine(Engine):
    """The members of a rank. Upstream's code enqueues, pins, and keeps to no budget.

    Args:
        sources: DistributedOptimizers that were built with upstream's offloader.
        member: drives that of one of them.
    """

    limits = "optimizer.optimizer_state_offload_fraction"

    def __init__(self, sources: Sequence[MegatronSource], member: type[Member]) -> None:
        self.name, self.sources, self.traffic = member.name, list(sources), Traffic()
        self._members: dict[Source, Member] = {source: member(source, self.traffic) for source in sources}
        self._saved: set[Source] = set()  # those of which a state dictionary is being made of the host's copies
        self.state_bytes = sum(each.state_bytes for each in self._of())
        self.planned_bytes = sum(each.planned_bytes for each in self._of())

    def _of(self, source: Source | None = None) -> list[Member]:
        return list(self._members.values()) if source is None else [self._members[source]]

    @property
    @override
    def pinned_bytes(self) -> int:
        buffers = (buffer for member in self._of() for buffer in member.host_buffers())
        return sum(power_of_two_at_least(buffer.nbytes) for buffer in buffers)

    @override
    def has_states(self) -> bool:
        return any(member.existing_bytes() for member in self._of())

    @override
    def begin_pass(self, is_like_others: bool = True) -> None:
        self.traffic.most_released = self.traffic.released
        for member in self._of():
            member.offload()

    @override
    def release(self) -> None:
        for member in self._of():
            member.release()

    @override
    def reload(self) -> None:
        for member in self._of():
            member.reload()

    @override
    def settle(self) -> None:
        for member in self._of():
            member.settle()

    @override
    def require_readable(self, source: Source | None = None, masters_only: bool = False) -> None:
        for member in self._of(source):
            member.require_readable()

    @override
    def require_writable(self, source: Source | None = None, masters_only: bool = False) -> None:
        for member in self._of(source):
            member.require_writable()

    @contextmanager
    @override
    def saving(self, source: Source, copies: bool) -> Iterator[None]:
        if not self._members[source].serves_saves:
            self.require_readable(source)
            yield
            return
        self._saved.add(source)
        try:
            yield
        finally:
            self._saved.discard(source)

    @override
    def is_away(self, source: Source) -> bool:
        return source in self._saved

    @override
    def hand_out(self, source: Source, param: torch.Tensor, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return read() if self.is_away(source) else super().hand_out(source, param, read)

    @property
    @override
    def is_lost(self) -> bool:
        return any(member.interrupted for member in self._of())

    @override
    def close(self) -> None:
        self.require_writable()  # gives up generation 1's copies out
        self.require_readable()  # waits for generation 2's; upstream keeps its host buffers until the optimizer goes
        self._members.clear()
        self.sources = []
