"""The protocol between the patches and whatever moves the bytes: one engine a rank, attached to its optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from bridge_fgo.config import readable
from bridge_fgo.memory.meters import Traffic
from bridge_fgo.offload.profile import Mark
from bridge_fgo.offload.snapshot import States, Write
from bridge_fgo.states.source import Source


class Engine(ABC):
    """Offloads the states of all sources of a rank; there may be none. Every verb is idempotent, in any order.

    The verbs of a training step, in their order: inside `training_step`, for each forward-backward pass `begin_pass`,
    `release`, `point` again and again, `reload`, and for each optimizer that steps `updating` and `stepping`; after it
    `settle` and `end_step`.
    """

    name: str  # "native", or the name of mcore's own offloader
    sources: Sequence[Source]
    # of all states on this rank, offloaded or not; before the first step made the moments, as they will be
    state_bytes: int
    planned_bytes: int  # of them that are offloaded when all exist
    traffic: Traffic  # what has moved so far, and what it cost the host
    pin_seconds = 0.0  # host time that page-locking took, before training
    watches_points = False  # whether `point` is of use
    checks_inputs_only = False  # whether every state stays in this pass; only input sizes are checked, by `forward`
    awaits_ranks = False  # whether `end_step` is a collective of all ranks
    # whether an error ended an optimizer step after some parameters were updated and before others were
    is_torn = False
    is_lost = False  # whether something came in the midst of a move, so that nothing may use the states any more
    limits: str  # settings by which states stay on the GPU, if any do
    bytes_to_pin = 0  # host bytes that `pin` page-locks
    failed_fetches = 0  # copies to the GPU ahead of their time for which there was no memory, in the whole run

    # Before training.

    def pin(self) -> None:  # noqa: B027
        """Page-lock the host memory of the states, once it is known that the host has it; raises as `page_lock`."""

    # Figures.

    @property
    @abstractmethod
    def pinned_bytes(self) -> int:
        """Page-locked host bytes held for the states."""

    @property
    def held_budget_bytes(self) -> int | None:
        """Peak of allocated GPU memory that the newest pass was planned to keep to; None without a plan or a budget."""
        return None

    @property
    def planned_peak_bytes(self) -> int | None:
        """Peak of allocated GPU memory that the newest pass was planned to keep under; None without a plan."""
        return None

    @abstractmethod
    def has_states(self) -> bool:
        """Return whether there is anything to offload yet."""

    def resident_note(self) -> str:
        """Return, in words, what stays on the GPU and why; empty where nothing does."""
        left = self.state_bytes - self.planned_bytes
        return f"{readable(left)} of state by {self.limits}" if left else ""

    # A training step.

    @contextmanager
    def training_step(self, kind: object, is_saved_next: bool = False) -> Iterator[None]:
        """Context of a training step; `is_saved_next`: a checkpoint is to be saved when it is done.

        Passes of one `kind` (the number of microbatches) need as much memory.
        """
        yield

    @abstractmethod
    def begin_pass(self, is_like_others: bool = True) -> None:
        """Start the copies to the host: a forward-backward pass begins.

        Nothing is learned from one that does not need as much memory as others of its kind (`is_like_others`).
        """

    @abstractmethod
    def release(self) -> None:
        """Give GPU memory back: nothing reads the states any more until the optimizer steps."""

    def point(self, mark: Mark) -> bool:
        """Let states move at a point of the model; return False, and move nothing, in the capture of a CUDA graph."""
        return True

    def forward(self, layer: int, nbytes: int) -> None:  # noqa: B027
        """Compare the bytes of a layer's inputs with measured ones as its forward begins, if `checks_inputs_only`."""

    @abstractmethod
    def reload(self) -> None:
        """Take GPU memory again and start the copies to it: the last backward is done."""

    def updating(self) -> None:  # noqa: B027
        """Raise RuntimeError, before the first optimizer of a step is updated, unless all of them can be."""

    @contextmanager
    def stepping(self, source: Source) -> Iterator[None]:
        """Context of an optimizer's step with ready gradients, which finds its states where it needs them."""
        self.require_writable(source)
        yield

    def write_back(self, source: Source, copy: Callable[[], Any]) -> Any:
        """Call `copy`, which copies masters to the model's weights, with every master readable that it reads."""
        self.require_readable(source, masters_only=True)
        return copy()

    @abstractmethod
    def settle(self) -> None:
        """End the training step's moves: what reads the masters on the current stream may, from now on."""

    def end_step(self, updated: bool) -> None:  # noqa: B027
        """End the training step, in which the optimizers of all ranks have stepped (`updated`) or not.

        ValueError, with the least budget that can be met, where the budget cannot.
        """

    # Readers and writers, on the current stream; of one source, or of all.

    @abstractmethod
    def require_readable(self, source: Source | None = None, masters_only: bool = False) -> None:
        """Have work queued on the current stream from now on find the states (or masters) readable."""

    @abstractmethod
    def require_writable(self, source: Source | None = None, masters_only: bool = False) -> None:
        """Do as `require_readable`, and give up copies out under way: what is written now would not be in them."""

    @contextmanager
    def overwriting_masters(self, source: Source) -> Iterator[None]:
        """Context for overwriting every master, and states beside; their old values are not validated."""
        self.require_writable(source)
        yield

    def rewrite_masters(self, source: Source, copy: Callable[[], Any]) -> Any:
        """Call `copy`, which makes every master anew of the model's weights."""
        with self.overwriting_masters(source):
            return copy()

    def rewrite_weights(self, source: Source, copy: Callable[[], Any]) -> None:
        """Call `copy`, which makes the model's weights anew of every master."""
        self.require_readable(source, masters_only=True)
        copy()

    def make_states(self, source: Source, make: Callable[[], None]) -> None:
        """Call `make`, which makes every state that does not exist, and may write those that do (`Source.making`)."""
        self.require_writable(source)
        make()

    def states_replaced(self, source: Source) -> None:  # noqa: B027
        """Let go of the memory of states in whose place something may have put other tensors."""

    def require_whole(self, source: Source, what: str) -> None:  # noqa: B027
        """Raise RuntimeError where an error ended a step, or a load, half-way; `what` is to be done ("saved")."""

    def offload_now(self, whole: bool = False) -> None:  # noqa: B027
        """Offload every state that may be, and wait: something between steps takes memory, or loads weights.

        Masters that have no memory yet are made first (`State.take_first`). With `whole` masters are copied whole, so
        that they are right whatever is loaded over the model's weights.
        """

    # Checkpoints.

    @contextmanager
    def saving(self, source: Source, copies: bool) -> Iterator[None]:
        """Context of a save: `hand_out` gives states, with `copies` safe to keep, else to be copied at once."""
        self.require_readable(source)
        yield

    @contextmanager
    def loading(self, source: Source, everything: bool = False, masters: bool = False) -> Iterator[None]:
        """Context in which states are loaded from a checkpoint: `hand_out` says where to, and `put` writes them.

        With `everything` states that are on the GPU leave first, so that nothing is loaded there; with `masters` every
        master is written inside the block.
        """
        self.require_writable(source)
        yield

    def load_begins(self, source: Source) -> None:  # noqa: B027
        """Note that states are about to be overwritten one after another: nothing may use them before `load_ends`."""

    def load_ends(self, source: Source) -> None:
        """Note that every state has been overwritten that was to be."""
        self.states_replaced(source)

    def put(
        self, source: Source, param: torch.Tensor, hand_out: Callable[[], object], loaded: States, write: Write
    ) -> None:
        """Put loaded states of the optimizer parameter `param` in their place; see `Loading.put`."""
        self.require_writable(source)
        write(loaded)

    def is_checkpointing(self, source: Source) -> bool:
        """Return whether a source is being saved or loaded, so that `hand_out` gives its states wherever they are."""
        return False

    def hand_out(self, source: Source, param: torch.Tensor, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `read` returns, the states of the optimizer parameter `param` by name, readable."""
        self.require_readable(source)
        return read()

    def use_worker_memory(self) -> None:  # noqa: B027
        """Have checkpoints get shared memory from now on, lent or copied: a worker process writes it."""

    def copied_for_a_save(self) -> list[int]:
        """Return the bytes, at most, of each host tensor that a checkpoint gets of the states."""
        return []  # it gets the tensors themselves

    @abstractmethod
    def close(self) -> None:
        """Make the states resident for good and let go of host memory, streams and hooks.

        RuntimeError where states cannot be brought back. They stay as they are, and it may be called again.
        """


ATTACHED = "_bridge_fgo_attached"  # attribute of an optimizer of mcore's that holds its `Attachment`


class Attachment(NamedTuple):
    """What an optimizer is attached to: the engine, and the source that it is to it."""

    engine: Engine
    source: Source


def attachment_of(optimizer: Any) -> Attachment | None:
    """Return what an optimizer is attached to, or None."""
    return vars(optimizer).get(ATTACHED)
