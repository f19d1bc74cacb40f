"""What the plan says of states against what the engine measures in training."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.demo import missing_packages
from bridge_fgo.tools.job.held import OptimizerStates
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.job.layout import states_of_leaves
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.plan.state import states_of_ranks, sum_of

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
    from cpu_training import CpuOptions, CpuTraining

    import bridge_fgo

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
    from cpu_training import CpuOptions, CpuTraining

    import bridge_fgo

    config = OffloadConfig(engine="native", **asked)
    with bridge_fgo.install(config), CpuTraining(CpuOptions(offload=True)) as run:
        run.step()
        run.step()
        plan, _ = planned(run, config)
        assert plan.offloaded == bridge_fgo.stats().offloaded_bytes
    assert 0 < plan.offloaded < plan.total


def test_a_strategy_that_there_is_not_is_an_error_with_its_setting():
    ddp = SimpleNamespace(use_megatron_fsdp=True, data_parallel_sharding_strategy="zero3")
    config = SimpleNamespace(optimizer=SimpleNamespace(optimizer="adam"), ddp=ddp, model=None, dist=None)
    with pytest.raises(ValueError, match=r"ddp\.data_parallel_sharding_strategy='zero3': one of no_shard"):
        states_of_ranks(Job(config, Parallel(8, 1, 1, 1, 1, 1), [], "test"), OffloadConfig())
