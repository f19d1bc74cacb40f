"""What the plan says of states against what the engine measures in training, and the bounds against mcore's layout."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.demo import missing_packages
from bridge_fgo.tools.job.held import OptimizerStates, Tensor
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.job.layout import states_of_leaves
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.plan.bound import bound_of
from bridge_fgo.tools.plan.state import layout_of, sum_of

needs_megatron = pytest.mark.skipif(bool(missing_packages()), reason="compares with Megatron")

OPTIONS = {
    "plain": {},
    "two chunks": {"chunks": 2},
    "experts": {"experts": True},
    "most parameters frozen": {"frozen": True},
    "fp16": {"precision": "fp16"},
    "native fp32 parameters": {"precision": "fp32_params"},
    "adam of whole parameters": {"optimizer": "adam", "precision": "fp32_params", "distributed": False},
    "muon of experts": {"optimizer": "muon", "experts": True, "distributed": False},
    "dist_muon": {"optimizer": "dist_muon", "frozen": True, "distributed": False},
    "Megatron-FSDP": {"fsdp": "optim_grads_params", "experts": True},
    "Megatron-FSDP, nothing sharded": {"fsdp": "no_shard"},
}


def planned(training, config):
    """Return the states of a training on one rank as an answer of the builder would have them."""
    answer = json.loads(json.dumps([asdict(states) for states in states_of_leaves(training.optimizer)]))
    held = [OptimizerStates(**states) for states in answer]
    return sum_of(((states.states(), states.divides) for states in held), config), held


@needs_megatron
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_states_are_to_the_byte_what_the_engine_measures(cpu_standins, options):
    import bridge_fgo
    from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining

    if "muon" in options.get("optimizer", ""):
        pytest.importorskip("emerging_optimizers")
    with bridge_fgo.install(OffloadConfig(engine="native")), CpuTraining(CpuOptions(offload=True, **options)) as run:
        while run.step().skipped:  # fp16 begins with a loss scale that overflows
            pass
        run.step()
        stats = bridge_fgo.stats()
        plan, held = planned(run, OffloadConfig(master_remainders=False if "fsdp" in options else None))
        homes = sum(sum(states.homes) for states in held)
        padding = homes - sum(numel * 4 for states in held if states.homes for _, numel, *_ in states.bundles)
        assert (plan.total, plan.offloaded) == (stats.state_bytes + padding, stats.offloaded_bytes + padding)
        assert plan.total == stats.released_bytes + padding > padding >= 0
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
        plan, _ = planned(run, config)
        assert plan.offloaded == bridge_fgo.stats().offloaded_bytes
    assert 0 < plan.offloaded < plan.total


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


def bound(tensors, ranks, **changes):
    """Return the bounds of a job of one stage."""
    optimizer = SimpleNamespace(optimizer="adam", use_precision_aware_optimizer=False)
    ddp = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, "overlap_grad_reduce": False}
    config = SimpleNamespace(optimizer=optimizer, ddp=SimpleNamespace(**ddp | changes), model=None, dist=None)
    job = Job(config, Parallel(ranks, 1, 1, 1, 1, 1), [[tensors]], "test")
    return job, bound_of(job, 0)


@needs_megatron
@settings(max_examples=60, deadline=None)
@given(TENSORS, st.sampled_from([1, 2, 3, 8]), st.sampled_from([None, 1, 4000]), st.booleans())
def test_no_rank_holds_more_than_the_bound_says(cpu_standins, tensors, ranks, bucket_size, align_far):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=bucket_size is not None,
        bucket_size=bucket_size,
        pad_buckets_for_high_nccl_busbw=align_far,
    )
    job, most = bound(tensors, ranks, pad_buckets_for_high_nccl_busbw=align_far)
    params = [of_mcore(tensor) for tensor in tensors]
    layouts = DistributedOptimizer.compute_full_param_layout(params, bucket_size, ranks, ddp, ranks).layouts
    buffers = sum(layout.bucket_indices[-1][1] * 4 for layout in layouts.values())
    assert buffers <= most.gradients
    of_ranks = [0] * ranks
    for key, layout in layouts.items():
        of_element = 8 if key.param_dtype == torch.float32 else 12
        for start, end, bucket in layout.param_index_map.values():
            first, last = layout.bucket_indices[bucket]
            size = (last - first) // ranks
            for rank in range(ranks):
                held = min(end, first + (rank + 1) * size) - max(start, first + rank * size)
                of_ranks[rank] += max(0, held) * of_element
    states = layout_of(job, OffloadConfig()).states[0]
    assert len(states) == ranks and max(of_ranks) <= states[0].total
    if ranks == 1:
        assert of_ranks == [states[0].total]


def of_mcore(tensor: Tensor) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.empty(tensor.numel, dtype=tensor.dtype, device="meta"))
    param.allreduce, param.shared_embedding = not tensor.expert, tensor.own_bucket
    return param


def test_without_a_layer_wise_optimizer_every_rank_has_all_that_is_trained():
    tensors = [Tensor("a", 1000), Tensor("b", 2000), Tensor("c", 3000, trainable=False)]
    job, most = bound(tensors, 4, use_distributed_optimizer=False)
    assert [states.total for states in layout_of(job, OffloadConfig()).states[0]] == 4 * [12 * 3000]
    assert "Megatron-Bridge is not installed" in most.bound


@pytest.mark.parametrize(
    ("strategy", "parameters", "gradients", "states"),
    [("no_shard", 1, 1, 1), ("optim", 1, 1, 8), ("optim_grads", 1, 8, 8), ("optim_grads_params", 8, 8, 8)],
)
def test_each_strategy_of_megatron_fsdp_spreads_what_its_name_says(strategy, parameters, gradients, states):
    tensors = [Tensor(str(n), 2**20) for n in range(8)]
    job, most = bound(tensors, 8, use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy)
    whole = 2**23
    assert (most.parameters, most.gradients) == (2 * whole // parameters, 2 * whole // gradients)
    assert layout_of(job, OffloadConfig()).states[0][0].total == 12 * whole // states


def test_a_strategy_that_there_is_not_is_an_error_with_its_setting():
    job, _ = bound([Tensor("a", 1000)], 8)
    job.config.ddp.use_megatron_fsdp, job.config.ddp.data_parallel_sharding_strategy = True, "zero3"
    with pytest.raises(ValueError, match=r"ddp\.data_parallel_sharding_strategy='zero3': one of no_shard"):
        layout_of(job, OffloadConfig())
