"""The one state machine of where states are. Nothing else decides whether a tensor may be read or written."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import torch

from bridge_fgo.memory.guard import Guard, Touches, own


class Residency(enum.Enum):
    """Where the bytes of a slab are.

    RESIDENT: on the GPU, readable and writable on the training stream, and on that of whoever asked for it.
    OFFLOADING: a copy to the host is under way; the GPU copy is still there and readable.
    RELEASED: only the host copy is valid; the GPU memory is gone.
    RELOADING: GPU memory is there again and a copy to it is under way; not readable yet.
    """

    RESIDENT = "resident"
    OFFLOADING = "offloading"
    RELEASED = "released"
    RELOADING = "reloading"


class StillShared(RuntimeError):
    """GPU memory cannot be given back, because somebody else holds it, and has not been."""


class ResidencyMachine(ABC):
    """The residency of one slab, or of all that one of mcore's own offloaders moves.

    Six verbs drive it; a subclass supplies the five actions, each of which is called only in the residency that it
    is valid in. A verb that the present residency does not call for does nothing, so they may come in any order and
    any number of times: a second pass of the rerun loop, a skipped step and an early exit need no special case.
    After an action that was interrupted every verb raises RuntimeError, as `state` does.

    In any residency but RESIDENT the tensors are guarded: what touches one has the states back, writable, so that no
    list of readers and writers has to be complete.

    Args:
        touches: counts what touches bring back.
    """

    state_bytes = 0
    """Bytes of what moves."""

    def __init__(self, touches: Touches | None = None) -> None:
        self._residency = Residency.RESIDENT
        self.touches = touches or Touches()
        self._guard = Guard(self._touched)
        self.interrupted = ""
        """The type of what came in the midst of an action, other than an error that leaves the slab as it was."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors of the states that exist, as others hold them."""
        return ()

    @abstractmethod
    def _start_offload(self) -> None:
        """Start the copy to the host, after all work queued on the current stream."""

    @abstractmethod
    def _release(self) -> None:
        """Give the GPU memory back; it must not be reused before the copy to the host has read it."""

    @abstractmethod
    def _give_up_offload(self) -> None:
        """Let go of what only the copy to the host needed: nobody will use that copy."""

    @abstractmethod
    def _start_reload(self) -> None:
        """Take GPU memory and start the copy to it, after the copy to the host has ended."""

    @abstractmethod
    def _wait_reload(self) -> None:
        """Make the current stream wait for the copy to the GPU."""

    @property
    def state(self) -> Residency:
        """The present residency.

        Raises:
            RuntimeError: something came in the midst of an action, so that it is not known.
        """
        if self.interrupted:
            raise RuntimeError(
                f"the optimizer state cannot be used: {self.interrupted} came while a part of it was on "
                "its way between GPU and host; build the optimizer anew and resume from the last checkpoint"
            )
        return self._residency

    def _do(
        self, action: Callable[[], None], becomes: Residency, failures: tuple[type[RuntimeError], ...] = (RuntimeError,)
    ) -> None:
        """Do an action and note what has become of the slab, or neither.

        Ctrl-C, a signal's handler or a restart in process may come at any line between. A handler that raises
        RuntimeError (PyTorch's for a DataLoader's worker that died does) is told from a failure in `_release` alone.

        Args:
            action: one of the five.
            becomes: the residency after it.
            failures: what the action raises where it fails (no memory, an error of the driver's) and leaves the slab as
                it was; any RuntimeError by default.
        """
        if self._residency is Residency.RESIDENT:
            self._guard.put_on(self.tensors())
        try:
            with own():
                action()
            self._residency = becomes
        except failures:
            raise
        except BaseException as error:
            self.interrupted = type(error).__name__
            raise
        finally:
            self._take_off_guard()

    def _take_off_guard(self) -> None:
        if self._residency is Residency.RESIDENT and not self.interrupted:
            self._guard.take_off()

    def _touched(self, tensor: torch.Tensor) -> None:
        """Make the states readable and writable for whoever touches a tensor of them.

        Raises:
            RuntimeError: nothing may come back now; says what to call.
        """
        was_away = self.state is Residency.RELEASED
        if refusal := self.touches.refusal():
            raise RuntimeError(f"{self.name_of(tensor)} was used, and its memory is away: {refusal}")
        with torch.inference_mode(False), torch.no_grad():  # else what is made for it could not be written outside
            self.require_writable()
        self._take_off_guard()  # also where something came between a move and its note
        self.touches.count(self.state_bytes if was_away else 0)

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return what to call one of the tensors in a message."""
        return "optimizer state"

    def offload(self, start: Callable[[], None] | None = None) -> None:
        """Start towards the host, from RESIDENT or RELOADING.

        Args:
            start: does it in place of `_start_offload`.
        """
        if self.state is Residency.RELOADING:
            # Race: the copy to the host would read GPU memory that the reload has not filled yet, and
            # write the host buffer that the reload still reads.
            self._do(self._wait_reload, Residency.RESIDENT)
        if self._residency is Residency.RESIDENT:
            self._do(start or self._start_offload, Residency.OFFLOADING)

    def release(self) -> None:
        """Let go of the GPU memory of an OFFLOADING slab."""
        if self.state is Residency.OFFLOADING:
            # Memory that is gone cannot be taken back; before it goes, only these can be raised.
            self._do(self._release, Residency.RELEASED, (torch.OutOfMemoryError, StillShared))

    def release_unchanged(self) -> None:
        """Let go of the GPU memory of a RESIDENT slab that nothing has written since it came back.

        The host's copy must be what is on the GPU, and whole; whoever calls knows.
        """
        if self.state is Residency.RESIDENT:
            self._do(self._release, Residency.RELEASED, (torch.OutOfMemoryError, StillShared))

    def reload(self) -> None:
        """Start towards the GPU; a slab that was never released just stays."""
        if self.state is Residency.RELEASED:
            self._do(self._start_reload, Residency.RELOADING)
        else:
            self._keep()

    def _keep(self) -> None:
        if self.state is Residency.OFFLOADING:
            self._do(self._give_up_offload, Residency.RESIDENT)

    def reloaded(self) -> None:
        """Note that what `_wait_reload` does for a RELOADING slab was done together with others'."""
        self._residency = Residency.RESIDENT
        self._take_off_guard()

    def require_readable(self) -> None:
        """Make the states readable by work that the current stream gets from now on."""
        if self.state is Residency.RELEASED:
            self.reload()
        if self._residency is Residency.RELOADING:
            self._do(self._wait_reload, Residency.RESIDENT)

    def require_writable(self) -> None:
        """Make the states readable and writable by work that the current stream gets from now on.

        An offload under way is given up: its host copy will be stale, so it must not be released.
        """
        self.require_readable()
        self._keep()

    def send_away(self) -> None:
        """Have the host get the states as they are now, and let go of the GPU memory."""
        self.require_writable()  # a copy out under way may be of what they were
        self.offload()
        self.release()
