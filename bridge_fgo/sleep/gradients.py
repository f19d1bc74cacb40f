"""Gradients: dropped and zeroed on return, or kept by a copy; and the count of backwards since the last update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bridge_fgo.memory.storage_slab import StorageSlab


class Gradients:
    """The gradient memory of one of mcore's `_ParamAndGradBuffer`s, emptied and filled in place.

    That is the buffer that every `main_grad` and bucket is a view of, and the fp32 tensors of
    `param_name_patterns_for_fp32_local_accumulation`.

    Args:
        buffer: theirs.
        name: what to call it in messages.
        names: of parameters, by their `id`.
        comes_by: what to call to have them back.
    """

    def __init__(
        self, buffer: Any, name: str, names: Mapping[int, str], comes_by: str = "Residency.reload('grads')"
    ) -> None:
        named = [
            (f"the gradient of parameter {names.get(id(param), '')!r}", param.main_grad) for param in buffer.params
        ]
        named += [("a bucket of gradients", bucket.grad_data) for bucket in buffer.buckets]
        self.slabs = [StorageSlab(buffer.grad_data, f"{name}'s gradient buffer", comes_by, named=named)]
        self.slabs += [StorageSlab(extra, f"{name}'s fp32 gradients", comes_by) for extra in buffer.extra_main_grads]
        self._is_kept = False
        """Whether the host's copy is what they are to be when they return."""

    @property
    def device(self) -> torch.device:
        """Where they are when they are not away."""
        return self.slabs[0].device

    @property
    def is_away(self) -> bool:
        """Whether their memory is gone."""
        return any(slab.is_away for slab in self.slabs)

    def copy_out(self) -> int:
        """Copy them to the host, on the current stream, for the next `empty` to keep; return the bytes."""
        return sum(slab.copy_out() for slab in self.slabs)

    def empty(self, keep: bool) -> int:
        """Let their memory go; return its bytes. With `keep`, what `copy_out` copied comes back with it."""
        self._is_kept = keep
        return sum(slab.empty() for slab in self.slabs)

    def fill(self) -> int:
        """Take memory again, all of it or none; return its bytes. Zeroed, unless they are kept and `copy_in` follows.

        Raises:
            torch.OutOfMemoryError: there is none; they stay away.
        """
        return fill_all_or_none(self.slabs, zeroed=not self._is_kept)

    def empty_again(self) -> None:
        """Let go of what `fill` took, before anything was copied in: what was kept is kept."""
        for slab in self.slabs:
            slab.empty()

    def copy_in(self) -> int:
        """Copy back what was kept, on the current stream; return the bytes."""
        copied = sum(slab.copy_in() for slab in self.slabs) if self._is_kept else 0
        self._is_kept = False
        return copied

    def close(self) -> None:
        """Let go of the host memory."""
        for slab in self.slabs:
            slab.close()


def fill_all_or_none(slabs: Iterable[StorageSlab], zeroed: bool) -> int:
    """Take memory for storages that are away, or for none of them where it runs out; return the bytes.

    Raises:
        torch.OutOfMemoryError: it ran out.
    """
    taken: list[StorageSlab] = []
    try:
        for slab in slabs:
            if slab.is_away:
                slab.fill(zeroed)
                taken.append(slab)
        return sum(slab.nbytes for slab in taken)
    except BaseException:
        for slab in taken:
            slab.empty()
        raise


class Backwards:
    """Notes, by hooks, whether a backward has run through a DDP model since its gradients were last used or zeroed.

    The contents cannot tell: gradients of an update that is over are as large as those of one that is to come.
    """

    def __init__(self, ddp: Any) -> None:
        self.is_pending = False
        # The nodes that accumulate gradients, which DDP keeps alive: a hook on one runs for any kind of gradient,
        # fused into the weight's matrix product or not.
        self._handles = [node.register_hook(self._ran) for node in ddp.grad_accs]

    def _ran(self, *gradients: object) -> None:
        self.is_pending = True

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def drop_shard_gradients(params: Iterable[torch.Tensor]) -> int:
    """Set the `.grad` and `decoupled_grad` of an inner optimizer's parameters to None; return the bytes that went.

    mcore leaves them there until the next `zero_grad`: fp32 copies of this rank's shard where DDP reduces in 16 bits,
    else views of DDP's buffer, which hold no memory of their own.
    """
    freed = 0
    for param in params:
        for name in ("grad", "decoupled_grad"):
            gradient = getattr(param, name, None)
            if gradient is not None:
                if gradient._base is None:
                    freed += gradient.untyped_storage().nbytes()
                setattr(param, name, None)
    return freed
