"""The protocol of what moves the states: one engine a rank, which training steps drive and patches use.

For code that reads or writes states outside of a training step, an engine of mcore's offloaders reloads all of them.
`CheckpointingEngine` has verbs of its own for such code.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bridge_fgo.config import readable
from bridge_fgo.memory.meters import Traffic
from bridge_fgo.offload.profile import Mark
from bridge_fgo.states.source import Source


class Engine(ABC):
    """Offloads the states of all sources of a rank; there may be none. Every verb is idempotent, in any order.

    The verbs of a training step, in their order: inside `training_step`, for each forward-backward pass `begin_pass`,
    `release`, `point` again and again, `reload`, and for each optimizer that steps `updating` and `stepping`; after it
    `settle` and `end_step`.
    """

    name: str  # "native", or the name of mcore's own offloader
    sources: Sequence[Source]
    state_bytes: int  # of all states on this rank, offloaded or not, with moments that the first step will make
    planned_bytes: int  # of them that are offloaded when all exist
    traffic: Traffic  # what has moved so far, and what it cost the host
    pin_seconds = 0.0  # host time that page-locking took, before training
    watches_points = False  # whether `point` is of use
    awaits_ranks = False  # whether `end_step` is a collective of all ranks
    is_torn = False  # whether an error ended an optimizer step between the updates of two parameters
    is_lost = False  # whether a move was interrupted, so that nothing may use the states any more
    limits: str  # settings by which states stay on the GPU, if any do
    bytes_to_pin = 0  # host bytes that `pin` page-locks
    failed_fetches = 0  # prefetches for which there was no memory, in the whole run

    # Before training.

    def pin(self) -> None:  # noqa: B027
        """Page-lock the host memory of the states, once it is known that the host has it; raises as `page_lock`."""

    # Figures.

    @property
    @abstractmethod
    def pinned_bytes(self) -> int:
        """Page-locked host bytes held for the states."""

    @property
    def planned_peak_bytes(self) -> int | None:
        """Peak of allocated GPU memory that the newest pass was planned to keep under; None without a plan."""
        return None

    @abstractmethod
    def existing_bytes(self) -> int:
        """Return the bytes of the planned states that exist, wherever they are."""

    def resident_note(self) -> str:
        """Return, in words, what stays on the GPU and why; empty if nothing does."""
        left = self.state_bytes - self.planned_bytes
        return f"{readable(left)} of state by {self.limits}" if left else ""

    # A training step.

    @contextmanager
    def training_step(self, kind: object) -> Iterator[None]:
        """Context of a training step. Passes of one `kind` (the number of microbatches) need as much memory."""
        yield

    @abstractmethod
    def begin_pass(self, is_like_others: bool = True) -> None:
        """Start the copies to the host: a forward-backward pass begins.

        Nothing is learned from a pass that needs other memory than others of its kind (not `is_like_others`).
        """

    @abstractmethod
    def release(self) -> None:
        """Free GPU memory: nothing reads the states any more until the optimizer steps."""

    def point(self, mark: Mark) -> bool:
        """Let states move at a point of the model; return False, and move nothing, in the capture of a CUDA graph."""
        return True

    @abstractmethod
    def reload(self) -> None:
        """Allocate GPU memory and start the copies to it: the last backward is done."""

    def updating(self) -> None:  # noqa: B027
        """Raise RuntimeError, before the first optimizer of a step is updated, unless all of them can be."""

    @contextmanager
    def stepping(self, source: Source) -> Iterator[None]:
        """Context of an optimizer's step with ready gradients, in which its states are on the GPU as it needs them."""
        self.require_writable(source)
        yield

    @abstractmethod
    def settle(self) -> None:
        """End the training step's moves: work on the current stream may read the masters from now on."""

    def end_step(self, updated: bool) -> None:  # noqa: B027
        """End the training step, in which the optimizers of all ranks have stepped (`updated`) or not.

        ValueError, with the least budget that can be met, if the budget cannot.
        """

    # Readers and writers, on the current stream; of one source, or of all.

    @abstractmethod
    def require_readable(self, source: Source | None = None, masters_only: bool = False) -> None:
        """Make the states (or masters) readable for work that the current stream gets from now on."""

    @abstractmethod
    def require_writable(self, source: Source | None = None, masters_only: bool = False) -> None:
        """Do as `require_readable`, and give up copies out under way: they would lack what is written now."""

    def offload_now(self, whole: bool = False) -> None:  # noqa: B027
        """Offload all states that may be, and wait: something between steps takes memory, or loads weights.

        Masters that have no memory yet are made first (`State.take_first`). With `whole` masters are copied whole, so
        that they stay right when the model's weights are overwritten.
        """

    @abstractmethod
    def close(self) -> None:
        """Make the states resident for good, and release host memory, streams and hooks.

        RuntimeError if states cannot be reloaded. They stay as they are, and it may be called again.
        """
