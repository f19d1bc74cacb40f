"""Gradients: dropped and zeroed on reload, or copied; and whether a backward has run since the last update."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from bridge_fgo.engines.gradients import buckets_of
from bridge_fgo.memory.gradient_bucket import BucketState, GradientBucket
from bridge_fgo.memory.host_buffer import HostBuffer
from bridge_fgo.memory.storage_slab import StorageSlab
from bridge_fgo.memory.undo import undo_on_error
from bridge_fgo.sleep.moved import Kind, map_hosts

RELOADED_BY = "Residency.reload('grads')"


class GradientOffloader:
    """Empties and fills the gradient memory of mcore's `_ParamAndGradBuffer`s in place.

    These are the buffers that every `main_grad` and bucket is a view of, and the fp32 tensors of
    `param_name_patterns_for_fp32_local_accumulation`. `names` (of parameters, by their `id`) are for messages.

    If training manages the gradients of a buffer (`OffloadConfig.gradients`), its buckets are offloaded instead: they
    become zeros without memory, which nothing reloads, or are kept by the copies that training makes.
    """

    kind: Kind = "grads"

    def __init__(self, buffers: Sequence[Any], names: Mapping[int, str]) -> None:
        self._extras = [
            StorageSlab(extra, f"DDP buffer {i}'s fp32 gradients", RELOADED_BY)
            for i, buffer in enumerate(buffers)
            for extra in buffer.extra_main_grads
        ]
        self._buffers, self._names = buffers, names
        self._of_buffers: dict[int, StorageSlab] = {}  # by the place of the buffer, once training does not manage it
        self.is_kept = False  # whether `reload` copies them back from the host

    @property
    def slabs(self) -> list[StorageSlab]:
        """The storages, without those of buffers that training manages."""
        own = [(i, buffer) for i, buffer in enumerate(self._buffers) if not buckets_of(buffer)]
        for i, buffer in own:
            if i not in self._of_buffers:
                self._of_buffers[i] = self._slab_of(i, buffer)
        return [*(self._of_buffers[i] for i, _ in own), *self._extras]

    def _slab_of(self, i: int, buffer: Any) -> StorageSlab:
        named = [(f"the gradient of parameter {self._names.get(id(p), '')!r}", p.main_grad) for p in buffer.params]
        named += [("a bucket of gradients", bucket.grad_data) for bucket in buffer.buckets]
        return StorageSlab(buffer.grad_data, f"DDP buffer {i}'s gradient buffer", RELOADED_BY, named=named)

    @property
    def buckets(self) -> list[GradientBucket]:
        """The buckets of the buffers that training manages."""
        return [bucket for buffer in self._buffers for bucket in buckets_of(buffer)]

    @property
    def is_away(self) -> bool:
        """Whether any of their memory is released."""
        return any(slab.is_away for slab in self.slabs) or any(bucket.asleep for bucket in self.buckets)

    @property
    def is_here(self) -> bool:
        """Whether any of their memory is on the GPU."""
        return not all(slab.is_away for slab in self.slabs) or not all(bucket.asleep for bucket in self.buckets)

    @property
    def unmapped_bytes(self) -> int:
        """Bytes of host memory that `map_hosts` would map."""
        buckets = (bucket for bucket in self.buckets if bucket.state is BucketState.HERE and not bucket.has_host)
        return sum(slab.unmapped_bytes for slab in self.slabs) + sum(bucket.nbytes for bucket in buckets)

    def map_hosts(self) -> list[HostBuffer]:
        """Map the host memory for their copies; return what is new, to be page-locked."""
        full = [bucket for bucket in self.buckets if bucket.state is BucketState.HERE]
        return map_hosts(self.slabs) + [host for bucket in full for host in bucket.map_host()]

    def copy_out(self) -> int:
        """Copy them to the host, on the current stream; return the bytes."""
        copied = sum(slab.copy_out() for slab in self.slabs if not slab.is_away)
        for bucket in self.buckets:
            if bucket.state in (BucketState.HERE, BucketState.RELOADING):
                bucket.offload()
                copied += bucket.nbytes
        return copied

    def empty(self, kept: bool) -> int:
        """Release their memory; return its bytes. kept: `copy_out` has copied them, and `reload` copies them back."""
        self.is_kept = kept
        freed = sum(slab.empty() for slab in self.slabs)
        for bucket in self.buckets:
            freed += 0 if bucket.gpu is None else bucket.nbytes
            if not self.is_kept:
                bucket.zero()
            elif bucket.state is BucketState.OFFLOADING:
                bucket.release()
            bucket.guard_views()
            bucket.asleep = RELOADED_BY
        return freed

    def reload(self) -> tuple[int, int]:
        """Take memory again, and zero it or copy back what was kept; return the bytes of memory, and those copied.

        Raises:
            torch.OutOfMemoryError: there is no memory; all stay away, and what was kept stays kept.
        """
        kept = self._reload_buckets()
        away = [slab for slab in self.slabs if slab.is_away]
        with undo_on_error(*(slab.empty for slab in away)):
            taken = sum(slab.fill(zeroed=not self.is_kept) for slab in away)
        copied = sum(slab.copy_in() for slab in away) if self.is_kept else 0
        self.is_kept = False
        return taken + kept, copied + kept

    def _reload_buckets(self) -> int:
        """Reload the buckets that were kept, all or none; return their bytes."""
        kept = [bucket for bucket in self.buckets if bucket.state is BucketState.OFFLOADED]
        try:
            for bucket in kept:
                bucket.reload()
        except BaseException:
            for bucket in kept:
                if bucket.state is BucketState.RELOADING:
                    bucket.offload()
                    bucket.release()
            raise
        for bucket in self.buckets:
            bucket.asleep = ""
        for bucket in kept:
            bucket.require()
        return sum(bucket.nbytes for bucket in kept)

    def close(self) -> None:
        """Release the host memory."""
        for slab in self.slabs:
            slab.close()
        for bucket in self.buckets:
            if not bucket.moves:  # training does not use its host memory
                bucket.close_host()


class Backwards:
    """Notes, by hooks on mcore's DDP models, whether a backward has run since gradients were last used or zeroed."""

    def __init__(self, ddps: Iterable[Any]) -> None:
        self.pending: set[int] = set()  # the `id`s of models whose gradients no update has used yet
        # DDP keeps these nodes, which accumulate gradients, alive. Their hooks run for every kind of gradient, even if
        # the weight's matrix product accumulates it.
        self._handles = [node.register_hook(self._noting(id(ddp))) for ddp in ddps for node in ddp.grad_accs]

    def _noting(self, of: int) -> Any:
        return lambda *gradients: self.pending.add(of)

    def zeroed(self, ddp: Any) -> None:
        """Note that the gradients of a model are zero."""
        self.pending.discard(id(ddp))

    def used(self) -> None:
        """Note that an update is over, and nothing needs the gradients."""
        self.pending.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def drop_shard_gradients(inner: torch.optim.Optimizer) -> int:
    """Set `.grad` and `decoupled_grad` of an inner optimizer's parameters to None; return the bytes that this frees.

    mcore keeps them until the next `zero_grad`: fp32 copies of this rank's shard if DDP reduces in 16 bits, else views
    of DDP's buffer, which hold no memory of their own.
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
