"""The plan's states of whole parameters against what the engine measures, and against how mcore deals them out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.demo import missing_packages
from bridge_fgo.tools.job.builder import tensor_of
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.job.tensors import Tensor
from bridge_fgo.tools.plan.whole_state import kept_by, whole_state_bytes

needs_megatron = pytest.mark.skipif(bool(missing_packages()), reason="compares with Megatron")

ONE = Parallel(1, 1, 1, 1, 1, 1)
DIST_MUON = SimpleNamespace(optimizer="dist_muon")
OPTIONS = {
    "adam": {"optimizer": "adam", "precision": "fp32_params"},
    "muon_of_experts": {"optimizer": "muon", "experts": True},
    "dist_muon": {"optimizer": "dist_muon", "frozen": True},
}


def tensors_of(training):
    found = [tensor_of(name, param, True) for chunk in training.model for name, param in chunk.named_parameters()]
    return [Tensor(**{**one, "dtype": getattr(torch, one["dtype"])}) for one in found]


@needs_megatron
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_states_are_to_the_byte_what_the_engine_measures(cpu_standins, options):
    import bridge_fgo
    from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining

    if options["optimizer"] != "adam":
        pytest.importorskip("emerging_optimizers")
    asked = CpuOptions(offload=True, distributed=False, **options)
    with bridge_fgo.install(OffloadConfig(engine="native")), CpuTraining(asked) as run:
        run.step()
        run.step()
        stats = bridge_fgo.stats()
        assert stats is not None
        optimizer = run.cfg.optimizer
        plan = whole_state_bytes(kept_by(0, tensors_of(run), optimizer, ONE), optimizer, OffloadConfig())
        assert (plan.total, plan.offloaded) == (stats.state_bytes, stats.offloaded_bytes)
        assert plan.total == stats.released_bytes > 0


SIZES = st.lists(st.tuples(st.integers(1, 10**6), st.booleans()), unique_by=lambda one: one[0], max_size=20)


@needs_megatron
@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from([2, 3, 4]), st.sampled_from([1, 2]))
def test_a_layer_wise_rank_keeps_what_mcore_gives_it(cpu_standins, sizes, ranks, expert_ranks):
    from megatron.core.optimizer import layer_wise_optimizer as module

    tensors = [Tensor(str(numel), numel, expert=expert, matrix=True) for numel, expert in sizes]
    parallel = Parallel(ranks * expert_ranks, 1, 1, 1, ranks, 1)
    shards, expert_shards = parallel.shards(expert=False), parallel.shards(expert=True)
    assert (shards, expert_shards) == (ranks * expert_ranks, expert_ranks)
    for rank in range(parallel.stage_ranks):
        groups: list[dict[str, Any]] = [
            {
                "params": [torch.empty(t.numel, device="meta") for t in tensors if t.expert is expert],
                "is_expert_parallel": expert,
            }
            for expert in (False, True)
        ]
        mcore = module.LayerWiseDistributedOptimizer.__new__(module.LayerWiseDistributedOptimizer)
        mcore.dp_cp, mcore.expt_dp = (parallel.shard_index(rank, expert) for expert in (False, True))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "get_pg_rank", lambda group: group)
            mcore._shard_params_ping_pong([SimpleNamespace(param_groups=groups)], shards, expert_shards)
        theirs = sorted(param.numel() for group in groups for param in group["params"])
        assert sorted(tensor.numel for tensor in kept_by(rank, tensors, DIST_MUON, parallel)) == theirs


def test_without_a_layer_wise_optimizer_every_rank_keeps_all_that_is_trained():
    tensors = [Tensor("a", 1, matrix=True), Tensor("b", 2), Tensor("c", 3, trainable=False)]
    for rank in range(4):
        kept = kept_by(rank, tensors, SimpleNamespace(optimizer="muon"), Parallel(4, 1, 1, 1, 1, 1))
        assert kept == tensors[:2]
