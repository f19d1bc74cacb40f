"""The plan's first sentence says whether a job fits."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.job.held import Held, OptimizerStates, Tensor
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.plan import command
from bridge_fgo.tools.plan.estimate import make_estimate
from bridge_fgo.tools.plan.report import as_json, print_estimate
from bridge_fgo.tools.plan.systems import LEFT_FREE, SYSTEMS, links
from bridge_fgo.tools.plan.verdict import Outcome, lines, verdicts

GB = 10**9
MOMENTS = [("moment", name, "float32", True, False, False, False) for name in ("exp_avg", "exp_avg_sq")]


def held_in_shares(tensors: list[Tensor], ranks: int = 1, divides: bool = True) -> Held:
    """Return what ranks hold of 16-bit tensors without mcore: under a DistributedOptimizer, in even shares.

    divides: whether masters are copied to the weights part by part.
    """
    numel = sum(tensor.numel for tensor in tensors)
    share = left = -(-numel // ranks)
    bundles = []
    for tensor in reversed(tensors):  # as in mcore's buffers
        if left > 0:
            bundles.append([0, min(tensor.numel, left)])
        left -= tensor.numel
    kinds = [[("master", "master weight", "float32", False, True, divides, False), *MOMENTS]]
    states = OptimizerStates(divides, kinds, bundles, [])
    return Held(2 * numel, 4 * numel, 0, 0, [(2, 2 * numel, 2 * share)], [states], [[0]] * ranks)


def job(billions: float, **changes: object) -> Job:
    """A job of one GPU: 18 bytes a parameter, 12 of them states."""
    optimizer = SimpleNamespace(optimizer="adam")
    ddp = SimpleNamespace(use_distributed_optimizer=True)
    train = SimpleNamespace(global_batch_size=1, micro_batch_size=1)
    config = SimpleNamespace(optimizer=optimizer, ddp=ddp, train=train, model=SimpleNamespace(), dist=None)
    chunk = [Tensor(f"weight{i}", int(billions * 1e9 / 8), torch.bfloat16) for i in range(8)]
    parallel = Parallel(gpus=1, tensor=1, pipeline=1, context=1, expert=1, expert_tensor=1)
    made = replace(Job(config, parallel, [[chunk]], "test", flag=True), **changes)
    held = [held_in_shares(made.tensors(stage), made.parallel.data) for stage in range(len(made.stages))]
    return replace(made, held=held)


def estimate(billions: float, activations_gb: float | None = 1.0, system: str | None = None, **changes: object):
    activations = None if activations_gb is None else int(activations_gb * GB)
    of_links = links(system)
    offload = OffloadConfig(gpu_memory_budget_gib=changes.pop("budget", None))  # type: ignore[arg-type]
    return make_estimate(job(billions, **changes), offload, of_links, None, None, activations)


@pytest.fixture(autouse=True)
def no_activations_counted(monkeypatch):
    monkeypatch.setattr("bridge_fgo.tools.plan.estimate.activation_bytes", lambda job, stage: None)


@pytest.mark.parametrize(
    ("billions", "outcome"), [(3.0, Outcome.fits), (8.0, Outcome.with_offload), (20.0, Outcome.does_not)]
)
def test_the_verdict_is_of_the_gpus_memory(billions, outcome):
    (found,) = verdicts(estimate(billions, system="H100"))
    assert found.outcome is outcome
    assert found.room == SYSTEMS["H100"].gpu_bytes - SYSTEMS["H100"].gpu_bytes // 16
    (line,) = lines(estimate(billions, system="H100"), [found])
    assert line.startswith(f"{outcome.capitalize()} on 1 GPU of H100: peak ")
    assert found.is_trainable(flag=True) == (outcome is not Outcome.does_not)
    assert found.is_trainable(flag=False) == (outcome is Outcome.fits)


def test_several_systems_are_grouped_by_what_becomes_of_the_job():
    of_all = estimate(8.0)
    (line,) = lines(of_all, verdicts(of_all))
    assert line.startswith("Fits on GB200, GB300, B200, B300; fits only with the offload on GH200, H200, H100: peak ")


def test_an_offload_that_is_refused_fits_nothing():
    refused = estimate(8.0, system="H100", refusals=["no such thing"], flag=False)
    (found,) = verdicts(refused)
    assert found.outcome is Outcome.does_not
    assert [*lines(refused, [found])][1] == "the offload, with which it would, is refused (below)"


@pytest.mark.parametrize("changes", [{"refusals": ["no"]}, {"budget": 20.0}])
def test_what_training_refuses_fits_nowhere_with_the_flag_set(changes):
    (found,) = verdicts(estimate(3.0, system="H100", **changes))
    assert found.outcome is Outcome.refused and not found.is_trainable(flag=True)
    assert verdicts(estimate(3.0, system="H100", flag=False, **changes))[0].outcome is Outcome.fits


@pytest.mark.parametrize(
    ("budget", "outcome"), [(70.0, Outcome.with_offload), ("auto", Outcome.with_offload), (90.0, Outcome.does_not)]
)
def test_the_verdict_is_of_the_budget_that_was_given(budget, outcome):
    (found,) = verdicts(estimate(6.0, system="H100", budget=budget))
    limit = found.room if budget == "auto" else budget * 2**30
    assert found.outcome is outcome and limit - 9.1 * GB < found.offloaded <= limit  # parts have 9 GB


@pytest.mark.parametrize(
    ("billions", "flag", "budget", "peak"),
    [(4.36, False, None, 79.58), (4.48, False, None, 81.74), (4.36, True, "auto", None), (4.0, False, None, None),
     (8.4, True, None, 80.16)],
)  # fmt: skip
def test_a_peak_about_as_large_as_the_room_is_a_close_call(billions, flag, budget, peak):
    of_job = estimate(billions, system="H100", flag=flag, budget=budget)
    (found,) = verdicts(of_job)
    assert found.close == ("" if peak is None else f"Close call: {peak:.2f} of 80.18 GB")
    assert (found.close in [*lines(of_job, [found])]) == bool(peak)


def test_a_host_without_the_memory_fits_nothing(monkeypatch):
    monkeypatch.setitem(SYSTEMS, "H100", replace(SYSTEMS["H100"], host_bytes=90 * GB))
    (found,) = verdicts(estimate(8.0, system="H100"))
    assert found.outcome is Outcome.does_not and "pins 96 GB on a node that has 90 GB" in found.why
    monkeypatch.setitem(SYSTEMS, "H100", replace(SYSTEMS["H100"], host_bytes=30 * GB))
    found = [verdicts(estimate(3.0, system="H100", flag=flag))[0].outcome for flag in (True, False)]
    assert found == [Outcome.does_not, Outcome.fits]  # which pins, whether or not it has to offload


def test_activations_that_are_not_counted_make_a_lower_bound_and_no_promise():
    small, large = (estimate(size, None, "H100") for size in (3.0, 20.0))
    assert [verdicts(of)[0].outcome for of in (small, large)] == [Outcome.unknown, Outcome.does_not]
    assert "peak at least " in next(lines(small, verdicts(small)))


def test_the_first_line_is_the_verdict_also_where_only_a_speed_is_given(capsys):
    from rich.console import Console

    of_speed = make_estimate(job(8.0), OffloadConfig(), links(None, 10.0, None), None, None, GB)
    print_estimate(Console(), of_speed)
    assert capsys.readouterr().out.startswith("Fits on GB200")
    assert len(json.loads(json.dumps(as_json(of_speed)))["verdicts"]) == len(SYSTEMS)


@pytest.mark.parametrize(
    ("billions", "flag", "status"), [(3.0, False, 0), (8.0, True, 0), (8.0, False, 1), (20.0, True, 1)]
)
def test_check_is_a_status(monkeypatch, billions, flag, status):
    monkeypatch.setattr(command, "read_job", lambda *_: job(billions, flag=flag))
    settings = command.Settings("x", system="H100", activations_gb=1.0, check=True, json_output=True)
    assert command.run(settings) == status
    assert command.run(replace(settings, check=False)) == 0


def test_check_promises_nothing_where_activations_are_not_counted(monkeypatch):
    monkeypatch.setattr(command, "read_job", lambda *_: job(3.0))
    with pytest.raises(ValueError, match="--activations-gb"):
        command.run(command.Settings("x", system="H100", check=True, json_output=True))


def test_an_h100_is_planned_as_the_h200_was_measured():
    h100, h200 = SYSTEMS["H100"].link, SYSTEMS["H200"].link
    for gpus in (1, 2, 8):
        assert h100.of_node_with(gpus).figures == h200.of_node_with(gpus).figures
    assert not h100.measured and h200.measured
    assert LEFT_FREE == 16 and 142.2e9 <= SYSTEMS["H200"].gpu_bytes * (1 - 1 / 18) < 142.5e9
