"""The protocol between an engine and the owner of states: one source for each optimizer of a rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from bridge_fgo.memory.slab import Part
from bridge_fgo.memory.state_tensor import Bundle


class Source(ABC):
    """Says which tensors a rank may give away, and updates a subset of them at a time.

    To offload another kind of state, implement this class; `tests/engines/toy_source.py` is the smallest one.
    """

    @property
    def writes_back_by_part(self) -> bool:
        """Whether `step` copies a part's masters to the weights, so that nothing reads them later.

        Else they stay on the GPU until the next pass, and cannot be encoded by the weights that they round to.
        """
        return True

    @property
    def keeps_order(self) -> bool:
        """Whether parameters must be updated in the order of `states`, because ranks wait for each other in an update.

        Else those go first that are on the GPU first, which differs from rank to rank.
        """
        return False

    @property
    def updates_in_place(self) -> bool:
        """Whether an update of all parameters at once needs no memory beside that of their states.

        Then the step of a source whose states are all here need not be divided.
        """
        return False

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the states are when resident."""

    @abstractmethod
    def states(self) -> list[Bundle]:
        """Return the states of each parameter, made already or not, in the order in which they step."""

    @abstractmethod
    def kept_whole_by(self) -> str:
        """Return the name of what forbids to update the parameters part by part now; empty if nothing does."""

    def copy_kept_whole_by(self) -> str:
        """Return the name of what forbids to copy masters to weights part by part now; empty if nothing does."""
        return ""

    @abstractmethod
    def stepping(self, run: Callable[[], None], owners: Mapping[int, Part]) -> AbstractContextManager[None]:
        """Context in which the optimizer's step calls `run` instead, which calls `step` for each part and with None.

        `owners` has the part of each parameter, by `id`; parameters that are not in it belong to None.
        """

    @abstractmethod
    def step(self, part: Part | None) -> None:
        """Update a part, whose states are on the GPU, and copy it to the model's weights if that is done by part.

        None updates the parameters that belong to no part.
        """

    def rewriting(self, part: Part | None, parts: Iterable[Part]) -> AbstractContextManager[None]:
        """Context in which the owner's copy of the model's weights to masters, or of masters to weights, is a part's.

        None is what belongs to none of `parts`, which are all of this source.
        """
        return nullcontext()

    def making(
        self, make: Callable[[], None], owners: Mapping[int, Part]
    ) -> AbstractContextManager[Callable[[Part | None], None]]:
        """Context that gives a function that makes the states of a part, or with None those that belong to no part.

        For a source whose states are not made one by one (`State.make`). `make` is the owner's, which makes the states
        of all parameters that it finds.
        """
        raise NotImplementedError

    def writing_back(self) -> AbstractContextManager[frozenset[int] | None]:
        """Context in which the owner's copy of masters to weights leaves out what `step` has copied.

        It gives the `id` of each parameter that is left out; None while it is `step` itself that copies a part.
        """
        return nullcontext(frozenset())
