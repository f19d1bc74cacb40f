"""What one pass needed beside the slabs, point by point, and what went through the model at each point."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple


class Mark(NamedTuple):
    """What passes a point: a layer that begins its forward, or has ended its backward.

    layer: number of the layer, or `~number` where its backward has ended.
    nbytes: of the tensors that go into it.
    live: bytes that went into layers whose backward has not ended, this one's included until its own has.
    is_watched: whether passes in which nothing moves report it too; of a forward.
    """

    layer: int
    nbytes: int
    live: int
    is_watched: bool = True


@dataclass(eq=False)
class MemoryProfile:
    """Peaks of what is on the GPU beside the slabs in one pass and the step after it, in bytes."""

    intervals: list[int] = field(default_factory=list)
    """One for each point of the pass."""
    step: int = 0
    """From the end of the last backward to the end of the optimizer step."""
    marks: list[Mark] = field(default_factory=list)
    """What passed each point but the first, point 0."""
    kind: object = None
    """What the pass has in common with others of its kind: the number of microbatches."""
    beyond: int = 0
    """Bytes by which later passes went above what they were planned for by it; they hold as much less."""

    @property
    def peak(self) -> int:
        """The peak of a run whose states are released throughout."""
        return max([*self.intervals, self.step])

    @cached_property
    def forwards(self) -> list[Mark]:
        """Marks of the forwards that are watched, in their order; of a pass that is over."""
        return [mark for mark in self.marks if mark.layer >= 0 and mark.is_watched]

    def covers(self, index: int, mark: Mark) -> bool:
        """Return whether the interval of point `index` is a bound for a pass that has `mark` there.

        It is where the same layer got no less, and no less was live: memory grows with both.
        """
        if not 0 < index < len(self.intervals):
            return False
        mine = self.marks[index - 1]
        return mark.layer == mine.layer and mark.nbytes <= mine.nbytes and mark.live <= mine.live

    def covers_forward(self, index: int, layer: int, nbytes: int) -> bool:
        """Return whether forward number `index` of a pass is of the same layer as here, and gets no more.

        In all passes of a kind a backward comes at the same place among the forwards. So no more is live at any time
        either, and backwards tell nothing more.
        """
        if index >= len(self.forwards):
            return False
        mine = self.forwards[index]
        return layer == mine.layer and nbytes <= mine.nbytes

    def can_merge(self, other: MemoryProfile) -> bool:
        """Return whether the same layers passed in the same order, and at each point one pass was the larger one."""
        sizes = [(len(one.intervals), len(one.marks)) for one in (self, other)]
        if self.kind != other.kind or sizes[0] != sizes[1]:
            return False
        pairs = zip(self.marks, other.marks, strict=True)
        return all(a.layer == b.layer and (a.nbytes - b.nbytes) * (a.live - b.live) >= 0 for a, b in pairs)

    def merged(self, other: MemoryProfile) -> MemoryProfile:
        """Return the maximum of two profiles that can merge: at each point the mark of the larger pass."""
        marks = zip(self.marks, other.marks, strict=True)
        return MemoryProfile(
            [max(pair) for pair in zip(self.intervals, other.intervals, strict=True)],
            max(self.step, other.step),
            [max(pair, key=lambda mark: (mark.live, mark.nbytes)) for pair in marks],
            self.kind,
            max(self.beyond, other.beyond),
        )
