"""The plan's least budget and the engine's own, on the same tensors and the same peaks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, with_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan_by_hand import held_in_shares

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.offload.schedule import Schedule
from bridge_fgo.states.distributed import MegatronSource
from bridge_fgo.tools.job.held import Tensor
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.plan import estimate
from bridge_fgo.tools.plan.estimate import make_estimate
from bridge_fgo.tools.plan.state import states_of_ranks
from bridge_fgo.tools.plan.systems import System, links


@pytest.fixture(scope="module", autouse=True)
def small_parts():
    """Parts of a few kilobytes, and the activations that a test says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bridge_fgo.memory.layout.BYTES_WHILE_ENQUEUING", 200)
        patch.setattr("bridge_fgo.memory.layout.LEAST_PART_BYTES", 4096)
        patch.setattr(estimate, "activation_bytes", lambda job, stage: job.config.activations)
        yield


def budget_of(nbytes: int) -> OffloadConfig:
    return OffloadConfig(engine="native", gpu_memory_budget_gib=nbytes / 2**30)


def job_of(stages: list[list[int]], activations: int | None, masters_stay: bool, gpus_given: bool = True) -> Job:
    """A job whose pipeline stages have tensors of these sizes (elements), each on one rank."""
    config = SimpleNamespace(
        activations=activations,
        model=SimpleNamespace(),
        optimizer=SimpleNamespace(optimizer="adam"),
        ddp=SimpleNamespace(use_distributed_optimizer=True),
        dist=SimpleNamespace(),
    )
    pipeline = len(stages)
    # DDP's buffers have the last tensor first.
    chunks = [[[Tensor("", size) for size in reversed(sizes)]] for sizes in stages]
    held = [held_in_shares(chunk, divides=not masters_stay) for (chunk,) in chunks]
    return Job(config, Parallel(pipeline, 1, pipeline, 1, 1, 1), chunks, "test", gpus_given=gpus_given, held=held)


class Meter:
    """Peaks of a rank whose forward and backward have `activations` bytes, and whose optimizer step has none."""

    works = expands = True

    def __init__(self, others: int, activations: int) -> None:
        self.others, self.activations = others, activations
        self.schedule: Schedule | None = None

    def end_interval(self) -> int:
        assert self.schedule is not None
        beside = self.others + (0 if self.schedule.recorder.in_step else self.activations)
        return beside + self.schedule.ledger.nbytes


def bytes_that_leave(sizes: list[int], others: int, activations: int, masters_stay: bool, config: OffloadConfig) -> int:
    """Train two steps with the engine on a budget; return the bytes that it then moves. Raises its refusal."""
    optimizer = with_model(make_distributed_optimizer(sizes))
    optimizer.config = SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=masters_stay)
    meter = Meter(others, activations)
    source = MegatronSource(optimizer)
    engine = NativeEngine([source], config, meter)  # type: ignore[arg-type]
    schedule = meter.schedule = engine.schedule
    for _ in range(2):
        engine.begin_pass()
        engine.release()
        engine.reload()
        for param in optimizer.optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        with engine.stepping(source):
            optimizer.optimizer.step()
            engine.write_back(source, optimizer._copy_main_params_to_model_params)
        engine.settle()
        engine.end_step(updated=True)
    return sum(part.nbytes for part in schedule.parts if not part.stays)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 3000).map(lambda n: 64 * n), min_size=1, max_size=8),
    st.integers(0, 10**6),
    st.booleans(),
    st.floats(0.0, 1.0),
)
def test_what_the_plan_calls_possible_the_engine_keeps_and_what_it_refuses_the_engine_refuses(
    sizes, activations, masters_stay, share
):
    job = job_of([sizes], activations, masters_stay)
    (stage,) = make_estimate(job).stages
    least, others = stage.least_budget, stage.fixed - stage.states.total
    for budget in (least, least + int(share * stage.states.total)):
        config = budget_of(budget)
        plan = make_estimate(job, config)
        assert plan.refusals == []
        moved = bytes_that_leave(sizes, others, activations, masters_stay, config)
        assert plan.stages[0].away == min(moved, stage.states.total)
    config = budget_of(least - 1)
    with pytest.raises(ValueError, match="cannot be met") as refused:
        bytes_that_leave(sizes, others, activations, masters_stay, config)
    assert make_estimate(job, config).refusals == [str(refused.value).replace("needs ", "needs about ")]


def test_each_stage_keeps_what_its_own_peak_leaves_room_for_and_the_fullest_decides():
    job = job_of([[64_000] * 8, [64_000] * 2], 0, False)
    first, second = make_estimate(job).stages
    assert first.least_budget > second.least_budget + second.states.total
    plan = make_estimate(job, budget_of(first.least_budget))
    assert plan.refusals == []
    assert [stage.away for stage in plan.stages] == [first.states.total, 0]
    assert len(make_estimate(job, budget_of(first.least_budget - 1)).refusals) == 1
    of_one = [job_of([[64_000] * 8], 0, False, gpus_given) for gpus_given in (True, False)]
    (stage,) = make_estimate(of_one[0]).stages
    beside = stage.fixed - stage.states.total
    refused = [[len(make_estimate(job, budget_of(left)).refusals) for left in (beside - 1, beside)] for job in of_one]
    assert refused == [[1, 1], [1, 0]], "what more GPUs would share is not held against a budget"


def test_the_least_budget_is_of_the_rank_with_the_largest_part():
    job, of_other = job_of([[64 * 2000]], 0, False), job_of([[64 * 100] * 20], 0, False)
    (first,), (second,) = job.held, of_other.held
    held = replace(first, optimizers=[*first.optimizers, *second.optimizers], ranks=[[0], [1]])
    job = replace(job, parallel=Parallel(2, 1, 1, 1, 1, 1), held=[held])
    plan = make_estimate(job, OffloadConfig(master_remainders=True))
    (stage,) = plan.stages
    largest = [max(of_rank.parts) for of_rank in plan.states[0]]
    assert largest[0] == 12 * 64 * 2000 > largest[1]
    in_transit = largest[0] + 64 * 2000 * 17 // 8  # with what is copied in place of its masters
    assert max(plan.states[0][0].transits) == in_transit
    assert stage.least_budget == stage.fixed - stage.states.total + 2 * in_transit


def test_a_budget_that_training_finds_out_is_the_room_of_the_system_asked_for(monkeypatch):
    job, auto = job_of([[64_000] * 8], 0, False), OffloadConfig(gpu_memory_budget_gib="auto")
    (whole,) = make_estimate(job).stages
    least = whole.least_budget + 12 * 64_000
    monkeypatch.setattr(System, "room", least)
    of_link = links("H200")
    ours, numbers = (make_estimate(job, config, of_link) for config in (auto, budget_of(least)))
    assert 0 < ours.stages[0].away == numbers.stages[0].away < whole.states.total and ours.refusals == []
    for of_links, told in ((links(), job), (of_link, job_of([[64_000] * 8], None, False))):
        nobody_says = make_estimate(told, auto, of_links)
        assert nobody_says.stages[0].away == whole.states.total and "all counts as offloaded" in nobody_says.notes[-1]


def test_a_strategy_that_there_is_not_is_an_error_with_its_setting():
    ddp = SimpleNamespace(use_megatron_fsdp=True, data_parallel_sharding_strategy="zero3")
    config = SimpleNamespace(optimizer=SimpleNamespace(optimizer="adam"), ddp=ddp, model=None, dist=None)
    with pytest.raises(ValueError, match=r"ddp\.data_parallel_sharding_strategy='zero3': one of no_shard"):
        states_of_ranks(Job(config, Parallel(8, 1, 1, 1, 1, 1), [], "test"), OffloadConfig(), 1)
