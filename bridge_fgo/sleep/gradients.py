"""Gradients: dropped and zeroed on reload, or kept by a copy; and whether a backward has run since the last update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from bridge_fgo.memory.storage_slab import StorageSlab
from bridge_fgo.sleep.moved import Storages


class Gradients(Storages):
    """The gradient memory of mcore's `_ParamAndGradBuffer`s, emptied and filled in place.

    That is the buffers that every `main_grad` and bucket is a view of, and the fp32 tensors of
    `param_name_patterns_for_fp32_local_accumulation`. `names` (of parameters, by their `id`) and `comes_by` (what to
    call to reload them) are for messages.
    """

    def __init__(
        self, buffers: Sequence[Any], names: Mapping[int, str], comes_by: str = "Residency.reload('grads')"
    ) -> None:
        super().__init__([])
        for i, buffer in enumerate(buffers):
            named = [(f"the gradient of parameter {names.get(id(p), '')!r}", p.main_grad) for p in buffer.params]
            named += [("a bucket of gradients", bucket.grad_data) for bucket in buffer.buckets]
            name = f"DDP buffer {i}'s gradient buffer"
            self.slabs.append(StorageSlab(buffer.grad_data, name, comes_by, named=named))
            for extra in buffer.extra_main_grads:
                self.slabs.append(StorageSlab(extra, f"DDP buffer {i}'s fp32 gradients", comes_by))
        self.is_kept = False
        """Whether `reload` copies them back from the host, as `copy_out` has copied them before they were emptied."""

    def copy_out(self) -> int:
        """Copy them to the host, on the current stream; return the bytes."""
        return sum(slab.copy_out() for slab in self.slabs if not slab.is_away)

    def reload(self) -> tuple[int, int]:
        """Take memory again, and zero it or copy back what was kept; return the bytes of memory, and those copied.

        Raises:
            torch.OutOfMemoryError: there is no memory; all stay away, and what was kept stays kept.
        """
        away = [slab for slab in self.slabs if slab.is_away]
        taken = self.fill(zeroed=not self.is_kept)
        copied = sum(slab.copy_in() for slab in away) if self.is_kept else 0
        self.is_kept = False
        return taken, copied


class Backwards:
    """Notes, by hooks on mcore's DDP models, whether a backward has run since gradients were last used or zeroed.

    The contents cannot tell: gradients of a finished update are as large as those of the next one.
    """

    def __init__(self, ddps: Iterable[Any]) -> None:
        self.pending: set[int] = set()
        """The `id`s of models whose gradients no update has used yet."""
        # DDP keeps these nodes, which accumulate gradients, alive. Their hooks run for every kind of gradient, also
        # where the weight's matrix product accumulates it.
        self._handles = [node.register_hook(self._noting(id(ddp))) for ddp in ddps for node in ddp.grad_accs]

    def _noting(self, of: int) -> Any:
        return lambda *gradients: self.pending.add(of)

    def zeroed(self, ddp: Any) -> None:
        """Note that the gradients of a model are zero."""
        self.pending.discard(id(ddp))

    def used(self) -> None:
        """Note that an update is over, and nobody needs the gradients."""
        self.pending.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def drop_shard_gradients(inner: torch.optim.Optimizer) -> int:
    """Set `.grad` and `decoupled_grad` of an inner optimizer's parameters to None; return the bytes that this frees.

    mcore keeps them until the next `zero_grad`: fp32 copies of this rank's shard where DDP reduces in 16 bits, else
    views of DDP's buffer, which hold no memory of their own.
    """
    freed = 0
    for param in (param for group in inner.param_groups for param in group["params"]):
        for name in ("grad", "decoupled_grad"):
            gradient = getattr(param, name, None)
            if gradient is not None:
                if gradient._base is None:
                    freed += gradient.untyped_storage().nbytes()
                setattr(param, name, None)
    return freed
