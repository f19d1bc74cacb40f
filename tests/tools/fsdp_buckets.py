"""Counts the temporary buckets that a training under Megatron-FSDP has at a time, and asks for their bounds."""

import dataclasses

import pytest
import torch
from both import configure_trainings
from cpu_model import microbatches
from cpu_training import CpuOptions
from rank_child import Job, Rank

from bridge_fgo.tools.job.layout import buckets_of, temporary_bytes
from bridge_fgo.tools.job.parallel import Parallel


class Meter:
    """Bytes of all buckets of Megatron-FSDP's allocators, now and at the most; of pools, from their first use on."""

    def __init__(self, set_attribute):
        from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as module

        self.dynamic, self.pools, self._memory, self.most = {}, {}, {}, 0
        for allocator in (module.TemporaryBucketAllocator, module.StorageResizeBasedBucketAllocator):
            set_attribute(allocator, "allocate", self._allocating(allocator.allocate))
            set_attribute(allocator, "free", self._freeing(allocator.free))
        set_attribute(module.get_global_memory_buffer(), "get_tensor", self._get_tensor)

    @property
    def now(self):
        return sum(self.dynamic.values()) + sum(self.pools.values())

    def _note(self):
        self.most = max(self.most, self.now)

    def _allocating(self, original):
        def allocate(allocator, bucket_id, size, dtype, *args, **kwargs):
            bucket = original(allocator, bucket_id, size, dtype, *args, **kwargs)
            self.dynamic[id(allocator), bucket_id] = bucket.data.untyped_storage().nbytes()
            self._note()
            return bucket

        return allocate

    def _freeing(self, original):
        def free(allocator, bucket_id):
            original(allocator, bucket_id)
            self.dynamic.pop((id(allocator), bucket_id), None)

        return free

    def _get_tensor(self, shape, dtype, name, mem_alloc_context=None):
        """Stand for GlobalMemoryBuffer's, which allocates on the current CUDA device."""
        (numel,) = shape
        if (name, dtype) not in self._memory or self._memory[name, dtype].numel() < numel:
            self._memory[name, dtype] = torch.empty(numel, dtype=dtype)
            self.pools[name, dtype] = self._memory[name, dtype].nbytes
            self._note()
        return self._memory[name, dtype][:numel]


def train_and_measure(rank, job: Job, ddp: dict, model: dict):
    """Run as a rank of a training; return the bounds and the allocated bytes.

    ddp, model: settings of these sections that no option of the training has.
    """

    options, kept = CpuOptions(**job.changes), []
    configured = {
        f"{section}.{name}": value for section, of in (("ddp", ddp), ("model", model)) for name, value in of.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        configure_trainings(patch.setattr, configured)
        meter = Meter(setattr)
        with Rank(options, rank, job) as run:
            run._batches.iterable = microbatches(dataclasses.replace(options, seed=options.seed + rank))
            run.optimizer.optimizer.register_step_pre_hook(lambda *_: kept.append(meter.now))
            run.train(job.steps)
            cfg, parallel = run.cfg, Parallel(job.ranks, 1, 1, 1, 1, 1, options.instances)
            (chunk,) = run.model
            planned, in_step = temporary_bytes(list(buckets_of(chunk, cfg.ddp, parallel)), chunk.module, cfg.ddp)
            return {"planned": {"most": planned, "kept": in_step}, "found": {"most": meter.most, "kept": kept}}
