"""State tensors that may move, described as plain data that a source fills in."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class WeightShard:
    """The range of a weight buffer that a master is rounded to, in elements."""

    buffer: Callable[[], torch.Tensor]  # reads it as it is now: its memory may go and come; one callable for each
    first: int
    numel: int

    def tensor(self) -> torch.Tensor:
        """Return the range as a tensor, [numel]."""
        return self.buffer().view(-1)[self.first : self.first + self.numel]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: of a DTensor its shard, with nothing asked of the DTensor itself."""
    shard: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


@dataclass(frozen=True, eq=False)
class Home:
    """A storage that others hold views of: it is emptied and filled in place, and its tensors are never rebound."""

    nbytes: int  # also while it is empty


@dataclass(frozen=True, eq=False)
class State:
    """One tensor that a rank may give away; it may not exist yet."""

    kind: str  # what settings call it: "master" or "moment", or another word of its source
    name: str  # what its source calls it, for messages
    param: torch.Tensor  # that it belongs to, as the optimizer has it; of the same number of elements on this rank
    dtype: torch.dtype
    read: Callable[[], torch.Tensor | None]  # returns the tensor as it is now, or None before it exists
    late: bool = False  # whether the first step makes it, so that it shares no slab with what exists before
    written_back: bool = False  # whether its source copies it to a weight of the model once it is updated
    # the bf16 weights that it, in fp32, is rounded to then; None if they do not tell its high bits
    rounds_to: WeightShard | None = None
    converts: bool = False  # whether a checkpoint gets another dtype of it, made on the GPU
    home: Home | None = None  # that it must stay in, as others hold views of it; the states of one home move together
    offset: int = 0  # where it starts there, in bytes
    # makes one that is `late` before the first step does, with any content; None if that is left to its source
    make: Callable[[], None] | None = None
    # returns, once, what a tensor made without memory is to be copied from, in any dtype; None if it has memory
    take_first: Callable[[], torch.Tensor | None] = lambda: None
    # returns what others hold of it if that is not the tensor itself but one around it (a DTensor)
    handle: Callable[[], torch.Tensor | None] | None = None

    def handles(self) -> Iterator[torch.Tensor]:
        """Yield the tensor, if it exists, and what is around it."""
        tensor = self.read()
        if tensor is not None:
            yield tensor
            if self.handle is not None and (around := self.handle()) is not None:
                yield around

    @property
    def nbytes(self) -> int:
        """Size in bytes, also before the tensor exists."""
        return local(self.param).numel() * self.dtype.itemsize

    @property
    def saved_nbytes(self) -> int:
        """Bytes, at most, of the copy that a checkpoint gets: 16-bit states may be made fp32."""
        return self.nbytes * max(1, 4 // self.dtype.itemsize)

    def check_size(self, tensor: torch.Tensor) -> None:
        """Raise RuntimeError if the tensor is not of the size that was planned for it."""
        if tensor.nbytes != self.nbytes:
            raise RuntimeError(
                f"optimizer state {self.name!r} has {tensor.nbytes} bytes of {tensor.dtype}, planned were "
                f"{self.nbytes} of {self.dtype}: something replaced it by a tensor of another kind"
            )


@dataclass
class Bundle:
    """The states of one optimizer parameter."""

    param: torch.Tensor
    states: list[State] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Size of all states of the parameter in bytes."""
        return sum(state.nbytes for state in self.states)

    @property
    def homes(self) -> set[Home]:
        """The storages that its states must stay in."""
        return {state.home for state in self.states if state.home is not None}
