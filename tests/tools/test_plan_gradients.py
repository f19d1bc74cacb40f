"""What the plan says of `OffloadConfig.gradients`, on buckets of round sizes, and against DDP's own."""

import re
from dataclasses import replace

import pytest
from rich.console import Console
from test_plan_verdict import job as job_of_size
from test_plan_verdict import no_activations_counted  # noqa: F401 (a fixture)

from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.plan import recommend
from bridge_fgo.tools.plan.compute import Compute
from bridge_fgo.tools.plan.estimate import make_estimate
from bridge_fgo.tools.plan.report import as_json, print_estimate
from bridge_fgo.tools.plan.systems import links

GB = 10**9
LAZY, OFF = OffloadConfig(gradients="lazy"), OffloadConfig(gradients=True)
EIGHT = [(tensor, 10 * GB) for tensor in range(8)]
"""A bucket of 10 GB for each of the job's eight tensors."""
LARGE = [(7, 10 * GB), (6, 10 * GB), (5, 60 * GB)]
"""The last of a backward has three fourths of all."""


def job_of(microbatches: int, buckets: list[tuple[int, int]]):
    """A job of eight tensors, whose gradients have 80 GB."""
    job = job_of_size(20.0)
    job.config.train.global_batch_size = microbatches
    return replace(job, held=[replace(job.held[0], gradients=80 * GB, buckets=buckets)])


def plan_of(microbatches: int, buckets, offload: OffloadConfig, activations=80 * GB, forward=None, system="H200"):
    return make_estimate(job_of(microbatches, buckets), offload, links(system, None, 1), forward, None, activations)


@pytest.mark.parametrize(
    ("microbatches", "buckets", "offload", "together", "moving", "note"),
    [
        (1, EIGHT, OffloadConfig(), 160, 0, None),
        (4, EIGHT, OffloadConfig(), 160, 0, None),
        (1, EIGHT, LAZY, 90, 0, None),  # the activations of n tensors, and the gradients of all but n - 1
        (
            1,
            EIGHT,
            OFF,
            90,
            80,
            "with one microbatch a step: host memory is pinned for gradients, and none leaves",
        ),
        (4, EIGHT, LAZY, 160, 0, "with 4 microbatches a step: every gradient is there at the peak.*; use True"),
        (4, EIGHT, OFF, 100, 80, None),  # with the bucket that a backward needs the next one
        (4, EIGHT, replace(OFF, gpu_memory_budget_gib=500.0), 100, 80, "with a budget: figures are those of all grad"),
        (1, LARGE, LAZY, 140, 0, None),  # 60 of 80 GB of activations are left as the large bucket comes
        # Which is there from the beginning, with both others.
        (4, LARGE, OFF, 160, 20, r"60.00 GB on stage 0 stay, in buckets with more than a fourth"),
    ],
)
def test_gradients_count_at_the_peak_as_far_as_they_are_there_and_what_moves_is_pinned(
    microbatches, buckets, offload, together, moving, note
):
    plan = plan_of(microbatches, buckets, offload)
    (stage,) = plan.stages
    assert stage.peak(0) == stage.fixed + 80 * GB == plan.resident_peak, "resident all gradients are there"
    assert stage.spared == (160 - together) * GB
    assert stage.offloaded_peak == stage.peak(stage.away) - stage.spared == as_json(plan)["stages"][0]["peak_offloaded"]
    in_step = stage.parameters + stage.gradients + stage.other + 2 * max(stage.states.transits)
    whole_peak = stage.peak(stage.states.offloaded) - stage.spared
    assert stage.least_budget == max(whole_peak, in_step), "the optimizer's step has every gradient"
    assert stage.moving == moving * GB
    assert max(plan.pinned) == plan.links[0].pinned == stage.states.offloaded + stage.moving
    notes = [text for text in plan.notes if text.startswith("OffloadConfig.gradients=")]
    assert len(notes) == (note is not None) and all(re.search(note, text) for text in notes)


def test_a_microbatch_hides_gradients_where_it_takes_as_long_as_their_way(capsys):
    (bare,) = plan_of(4, EIGHT, OFF).links
    (without,) = plan_of(4, EIGHT, OffloadConfig()).links
    assert bare.gradient_seconds == pytest.approx(80e9 / 50.8e9)
    assert bare.most_floor == pytest.approx(without.most_floor + 3 * bare.gradient_seconds)
    assert without.gradient_seconds == 0.0
    for forward, added in ((0.1, 3 * (bare.gradient_seconds - 0.3)), (1.0, 0.0)):
        (moving,) = plan_of(4, EIGHT, OFF, forward=forward).links
        (resident,) = plan_of(4, EIGHT, OffloadConfig(), forward=forward).links
        assert moving.floor == pytest.approx(resident.floor + added)
    print_estimate(Console(width=1000), plan_of(4, EIGHT, OFF))
    (shown,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Gradients: ")]
    assert "up to 80.00 GB of a rank leave" in shown and "480.00 GB over the link a step" in shown
    assert shown.endswith("many seconds: 1.575 (H200).")
    print_estimate(Console(width=1000), plan_of(1, EIGHT, OFF))
    assert "Gradients: " not in capsys.readouterr().out


def test_lazy_gradients_are_recommended_where_a_step_has_one_microbatch_and_nothing_refuses_them(monkeypatch):
    monkeypatch.setattr(recommend, "compute_of", lambda *_: Compute(0.1, 0.2, 0.0, 1.0, 1.0))
    (link,) = links("B300", None, 1)

    def names(job):
        found = recommend.Recommender(job, link, activations=100 * GB).recommend()
        return found.advised, [choice.name for choice in found.choices if "lazy" in choice.name]

    job = job_of(1, EIGHT)
    job.config.ddp.overlap_grad_reduce = True
    job.config.model.seq_length, job.config.optimizer.use_distributed_optimizer = 4096, False
    advised, lazy = names(job)
    assert lazy == ["as configured, gradients lazy, least offload", "as configured, gradients lazy, all offloaded"]
    assert advised.name == lazy[0] and "optimizer.offload.gradients=lazy" in advised.overrides
    job.config.ddp.overlap_grad_reduce = False
    assert names(job)[1] == []
    job.config.ddp.overlap_grad_reduce, job.config.train.global_batch_size = True, 4
    assert names(job)[1] == []
