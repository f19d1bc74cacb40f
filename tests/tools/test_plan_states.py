"""The plan's layout and states against mcore's own layout, and against what the engine measures in training."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.demo import missing_packages
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.job.tensors import Tensor
from bridge_fgo.tools.plan.layout import buffers_of
from bridge_fgo.tools.plan.state import state_bytes

needs_megatron = pytest.mark.skipif(bool(missing_packages()), reason="compares with Megatron")

TENSORS = st.lists(
    st.builds(
        Tensor,
        st.just(""),
        st.integers(1, 3000),
        st.sampled_from([torch.bfloat16, torch.float32]),
        expert=st.booleans(),
        own_bucket=st.integers(0, 9).map(lambda n: n == 0),
    ),
    min_size=1,
    max_size=20,
)


def of_mcore(tensor: Tensor) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.empty(tensor.numel, dtype=tensor.dtype, device="meta"))
    param.allreduce, param.shared_embedding = not tensor.expert, tensor.own_bucket
    return param


@needs_megatron
@settings(max_examples=60, deadline=None)
@given(TENSORS, st.sampled_from([1, 2, 3, 8]), st.sampled_from([None, 1, 4000]), st.booleans(), st.booleans())
def test_layout_is_mcores(cpu_standins, tensors, ranks, bucket_size, fp32_gradients, align_far):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=fp32_gradients,
        overlap_grad_reduce=bucket_size is not None,
        bucket_size=bucket_size,
        pad_buckets_for_high_nccl_busbw=align_far,
    )
    parallel = Parallel(2 * ranks, tensor=2, pipeline=1, context=1, expert=1, expert_tensor=1)
    ours = buffers_of(tensors, True, ddp, parallel)
    params = [of_mcore(tensor) for tensor in tensors]
    theirs = DistributedOptimizer.compute_full_param_layout(params, bucket_size, ranks, ddp, 2 * ranks).layouts
    assert [(b.dtype, b.gradient, b.expert) for b in ours] == [
        (key.param_dtype, key.grad_dtype, key.is_expert_parallel) for key in theirs
    ]
    for buffer, layout in zip(ours, theirs.values(), strict=True):
        assert buffer.buckets == layout.bucket_indices
        assert [tuple(place[1:]) for place in buffer.places] == list(layout.param_index_map.values())


@settings(max_examples=60, deadline=None)
@given(TENSORS, st.sampled_from([1, 2, 3, 8]))
def test_every_element_is_in_exactly_one_shard(tensors, ranks):
    from types import SimpleNamespace

    ddp = SimpleNamespace(grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=4000)
    for buffer in buffers_of(tensors, True, ddp, Parallel(ranks, 1, 1, 1, 1, 1)):
        numel = dict.fromkeys(map(id, (place[0] for place in buffer.places)), 0)
        for index in range(buffer.shards):
            for tensor, part in buffer.shard(index):
                numel[id(tensor)] += part
        assert [numel[id(place[0])] for place in buffer.places] == [place[2] - place[1] for place in buffer.places]


def test_a_number_of_buckets_is_of_all_chunks_of_the_rank():
    from types import SimpleNamespace

    ddp = SimpleNamespace(grad_reduce_in_fp32=True, overlap_grad_reduce=True, num_buckets=4)
    chunk = [Tensor("", 1024)] * 4
    counts = [len(buffers_of(chunk, True, ddp, ONE, others)[0].buckets) for others in (0, 4096)]
    assert counts == [4, 2]


OPTIONS = {
    "plain": {},
    "two chunks": {"chunks": 2},
    "experts": {"experts": True},
    "most parameters frozen": {"frozen": True},
    "fp16": {"precision": "fp16"},
    "native fp32 parameters": {"precision": "fp32_params"},
}


def planned(training, config):
    chunks = [
        [
            Tensor(name, p.numel(), p.dtype, expert=not getattr(p, "allreduce", True), trainable=p.requires_grad)
            for name, p in chunk.named_parameters()
        ]
        for chunk in training.model
    ]
    buffers = [b for i, chunk in enumerate(chunks) for b in buffers_of(chunk, i == 0, training.cfg.ddp, ONE)]
    return state_bytes([(buffer, 0) for buffer in buffers], training.cfg.optimizer, training.cfg.ddp, config)


ONE = Parallel(1, 1, 1, 1, 1, 1)


@needs_megatron
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_states_are_to_the_byte_what_the_engine_measures(cpu_standins, options):
    import bridge_fgo
    from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining

    with bridge_fgo.install(OffloadConfig(engine="native")), CpuTraining(CpuOptions(offload=True, **options)) as run:
        while run.step().skipped:  # fp16 begins with a loss scale that overflows
            pass
        run.step()
        stats = bridge_fgo.stats()
        plan = planned(run, OffloadConfig())
        assert (plan.total, plan.offloaded) == (stats.state_bytes, stats.offloaded_bytes)
        assert plan.total == stats.released_bytes
        if options.get("precision") == "fp32_params":
            assert plan.masters < plan.moments // 2, "native fp32 parameters have no masters of their own"


@needs_megatron
@pytest.mark.parametrize(
    "asked", [{"moments": False}, {"master_weights": False}, {"fraction": 0.5}], ids=lambda asked: next(iter(asked))
)
def test_what_stays_by_the_settings_stays_in_the_plan(cpu_standins, asked):
    import bridge_fgo
    from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining

    config = OffloadConfig(engine="native", **asked)
    with bridge_fgo.install(config), CpuTraining(CpuOptions(offload=True)) as run:
        run.step()
        run.step()
        measured = bridge_fgo.stats().offloaded_bytes
        plan = planned(run, config)
        largest = 12 * max(p.numel() for p in run.model[0].parameters())
    assert plan.offloaded == measured if "fraction" not in asked else abs(plan.offloaded - measured) < largest
    assert 0 < plan.offloaded < plan.total
