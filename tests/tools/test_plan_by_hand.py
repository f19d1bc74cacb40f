"""The plan of jobs that are made by hand: whether they fit, gradients that leave, sleeps and wakes."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.job.held import Held, OptimizerStates, Tensor
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.plan import command, recommend
from bridge_fgo.tools.plan.activations import Backward
from bridge_fgo.tools.plan.compute import Compute
from bridge_fgo.tools.plan.estimate import make_estimate
from bridge_fgo.tools.plan.phases import ALONE, REFERENCE, REST, SLEEP, SLEEP_ALL, WAKE_ALL, plan_phases
from bridge_fgo.tools.plan.report import as_json, print_estimate
from bridge_fgo.tools.plan.systems import SYSTEMS, links
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
    offload = OffloadConfig(gpu_memory_budget_gib=changes.pop("budget", None))  # type: ignore[arg-type]
    return make_estimate(job(billions, **{"offload": offload} | changes), links=links(system), activations=activations)


@pytest.fixture(autouse=True)
def no_activations_counted(monkeypatch):
    monkeypatch.setattr("bridge_fgo.tools.plan.estimate.activation_bytes", lambda job, stage: None)


@pytest.mark.parametrize(
    ("billions", "outcome"), [(3.0, Outcome.fits), (8.0, Outcome.with_offload), (20.0, Outcome.does_not)]
)
def test_the_verdict_is_of_the_gpus_memory_and_of_several_systems_by_outcome(billions, outcome):
    (found,) = verdicts(estimate(billions, system="H100"))
    assert found.outcome is outcome
    assert found.room == SYSTEMS["H100"].gpu_bytes - SYSTEMS["H100"].gpu_bytes // 16
    (line,) = lines(estimate(billions, system="H100"), [found])
    assert line.startswith(f"{outcome.capitalize()} on 1 GPU of H100: peak ")
    assert found.is_trainable(flag=True) == (outcome is not Outcome.does_not)
    assert found.is_trainable(flag=False) == (outcome is Outcome.fits)
    if outcome is Outcome.with_offload:
        of_all = estimate(billions)
        (line,) = lines(of_all, verdicts(of_all))
        assert line.startswith("Fits on GB200, GB300, B200, B300; fits only with the offload on GH200, H200, H100: ")


@pytest.mark.parametrize(
    ("billions", "changes", "with_flag", "without"),
    [
        (3.0, {"refusals": ["no"]}, Outcome.refused, Outcome.fits),
        (3.0, {"budget": 20.0}, Outcome.refused, Outcome.fits),
        (8.0, {"refusals": ["no"]}, Outcome.refused, Outcome.does_not),
        (6.0, {"budget": 70.0}, Outcome.with_offload, Outcome.with_offload),
        (6.0, {"budget": "auto"}, Outcome.with_offload, Outcome.with_offload),
        (6.0, {"budget": 90.0}, Outcome.does_not, Outcome.does_not),
    ],
)
def test_the_verdict_is_of_the_budget_and_what_is_refused_fits_nowhere(billions, changes, with_flag, without):
    flagged, unset = (estimate(billions, system="H100", flag=flag, **changes) for flag in (True, False))
    (found,), (other,) = verdicts(flagged), verdicts(unset)
    assert (found.outcome, other.outcome) == (with_flag, without)
    if with_flag is Outcome.refused:
        assert not found.is_trainable(flag=True)
    else:
        limit = found.room if changes["budget"] == "auto" else changes["budget"] * 2**30
        assert limit - 9.1 * GB < found.offloaded <= limit  # parts have 9 GB
    if billions == 8.0:
        assert [*lines(unset, [other])][1] == "with the offload it would fit, but that is refused (below)"


@pytest.mark.parametrize(
    ("billions", "flag", "budget", "peak"),
    [(4.36, False, None, 79.58), (4.48, False, None, 81.74), (4.36, True, "auto", None), (4.0, False, None, None),
     (8.8, True, None, 79.30)],
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
    of_speed = make_estimate(job(8.0), OffloadConfig(), links(None, 10.0, None), None, None, GB)
    print_estimate(Console(), of_speed)
    assert capsys.readouterr().out.startswith("Fits on GB200")
    assert len(json.loads(json.dumps(as_json(of_speed)))["verdicts"]) == len(SYSTEMS)


def test_what_is_printed_to_be_copied_is_in_one_line_and_no_markup(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    advice = "model.offload_modules=[core_attn,attn_proj] " + "optimizer.offload.gpu_memory_budget_gib=auto " * 3
    made = replace(estimate(8.0, system="H100"), notes=[f"note of {advice}"])
    print_estimate(
        Console(), replace(made, job=replace(made.job, refusals=[f"set {advice}"])), first=[f"first {advice}"]
    )
    printed = capsys.readouterr().out.splitlines()
    assert {f"first {advice}", f"refused: set {advice}", f"- note of {advice}"} <= set(printed)


@pytest.mark.parametrize(
    ("billions", "flag", "refused", "given", "status"),
    [
        (3.0, False, [], {}, 0),
        (8.0, True, [], {}, 0),
        (8.0, False, [], {}, 1),
        (20.0, True, [], {}, 1),
        (8.0, True, ["no"], {}, 1),
        (3.0, False, ["no"], {"gradients": "lazy"}, 1),  # which is given, and refused
        (3.0, False, ["no"], {}, 0),
    ],
)
def test_check_is_a_status_and_so_is_a_refusal(monkeypatch, billions, flag, refused, given, status):
    of_job = replace(job(billions, flag=flag), refusals=refused, offload=OffloadConfig(**given))
    monkeypatch.setattr(command, "read_job", lambda *_: of_job)
    settings = command.Settings("x", system="H100", activations_gb=1.0, check=True, json_output=True)
    assert command.run(settings) == status
    assert command.run(replace(settings, check=False)) == (status if refused else 0)
    if status == 0:  # which is promised with activations alone
        with pytest.raises(ValueError, match="--activations-gb"):
            command.run(replace(settings, activations_gb=None))


# --- gradients ---

LAZY, OFF = OffloadConfig(gradients="lazy"), OffloadConfig(gradients=True)
EIGHT = [(tensor, 10 * GB) for tensor in range(8)]
"""A bucket of 10 GB for each of the job's eight tensors."""
LARGE = [(7, 10 * GB), (6, 10 * GB), (5, 60 * GB)]
"""The last of a backward has three fourths of all."""


def job_of(microbatches: int, buckets: list[tuple[int, int]]):
    """A job of eight tensors, whose gradients have 80 GB."""
    made = job(20.0)
    made.config.train.global_batch_size = microbatches
    return replace(made, held=[replace(made.held[0], gradients=80 * GB, buckets=buckets)])


def plan_of(microbatches: int, buckets, offload: OffloadConfig, activations=80 * GB, forward=None, system="H200"):
    return make_estimate(job_of(microbatches, buckets), offload, links(system, None, 1), forward, None, activations)


@pytest.mark.parametrize(
    ("microbatches", "buckets", "offload", "together", "moving", "note"),
    [
        (1, EIGHT, OffloadConfig(), 160, 0, None),
        (4, EIGHT, OffloadConfig(), 160, 0, None),
        (1, EIGHT, LAZY, 90, 0, None),  # the activations of n tensors, and the gradients of all but n - 1
        (1, EIGHT, OFF, 90, 80, "with one microbatch a step: host memory is pinned for gradients, and none leaves"),
        (4, EIGHT, LAZY, 160, 0, "with 4 microbatches a step: every gradient is there at the peak.*; use True"),
        (4, EIGHT, OFF, 100, 80, None),  # with the bucket that a backward needs the next one
        (4, EIGHT, replace(OFF, gpu_memory_budget_gib=500.0), 100, 80, "with a budget: figures are those of all grad"),
        (1, LARGE, LAZY, 140, 0, None),  # 60 of 80 GB of activations are left as the large bucket comes
        # The large one is there from the beginning, with both others.
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


def test_beside_the_activations_of_several_microbatches_four_buckets_are_on_their_way_at_most(monkeypatch):
    most = [(60 * GB - 5 * GB * (7 - tensor), tensor) for tensor in reversed(range(8))]
    monkeypatch.setattr("bridge_fgo.tools.plan.estimate.backward_of", lambda *_: Backward(most, [(0, 0)]))
    (stage,) = plan_of(4, EIGHT, OFF, activations=60 * GB).stages
    # The peak is in the fifth tensor's backward. Six buckets have memory then: its own, the four before, and the next.
    assert stage.spared == (60 + 80) * GB - (40 + 60) * GB


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


# --- sleeps and wakes ---


def moves(stage):
    return {move["name"]: (move["params"], move["grads"], move["optimizer"]) for move in stage.moves}


@pytest.mark.parametrize("ranks", [1, 8])
def test_gradients_never_cross_and_of_data_parallel_ranks_each_copies_its_share(ranks):
    parallel = Parallel(gpus=ranks, tensor=1, pipeline=1, context=1, expert=1, expert_tensor=1)
    (stage,) = plan_phases(estimate(8.0, flag=False, parallel=parallel)).stages
    assert (stage.params, stage.grads, stage.optimizer) == (16 * GB, 32 * GB, 96 * GB // ranks)
    weights, states = 16 * GB // ranks, 96 * GB // ranks
    assert moves(stage) == {
        SLEEP: (weights, 0, states),
        ALONE: (weights, 0, 0),
        REST: (0, 0, states),
        SLEEP_ALL: (0, 0, states),  # masters tell the weights
        WAKE_ALL: (0, 0, states),
        REFERENCE: (16 * GB, 0, 0),  # which each rank has whole
    }


@pytest.mark.parametrize("system", ["H200", "GB300", "GH200"])
def test_seconds_are_bytes_over_the_link_beside_the_others_of_a_node_out_and_in_apart(system):
    parallel = Parallel(gpus=8, tensor=1, pipeline=1, context=1, expert=1, expert_tensor=1)
    ((link, seconds),) = plan_phases(estimate(8.0, system=system, flag=False, parallel=parallel)).seconds
    beside = SYSTEMS[system].link.of_node_with(SYSTEMS[system].link.gpus)
    assert (link.d2h, link.h2d) == (beside.d2h, beside.h2d)
    assert seconds[SLEEP] == pytest.approx(14 * GB / link.d2h)
    assert seconds[ALONE] == pytest.approx(2 * GB / link.h2d)
    h100, h200 = SYSTEMS["H100"].link, SYSTEMS["H200"].link  # which was measured
    assert [h100.of_node_with(gpus).figures for gpus in (1, 2, 8)] == [
        h200.of_node_with(gpus).figures for gpus in (1, 2, 8)
    ]
    assert h200.measured and not h100.measured


def test_masters_that_are_packed_or_transformer_engines_have_weights_copied_for_them():
    (stage,) = plan_phases(estimate(8.0, offload=OffloadConfig(master_remainders=True))).stages
    params, _, states = moves(stage)[WAKE_ALL]
    assert params == 16 * GB and states == pytest.approx(8 * 10.125 * GB, rel=0.001)
    of_job = job(8.0, flag=False)
    (held,) = of_job.held
    own = ("master", "master_param", "float32", True, False, False, False)
    held = replace(held, optimizers=[replace(held.optimizers[0], kinds=[[*MOMENTS, own]])])
    (stage,) = plan_phases(make_estimate(replace(of_job, held=[held]), links=links("H200"), activations=GB)).stages
    assert stage.untold == stage.shard == 16 * GB


def test_a_limit_below_what_the_flags_engine_has_is_refused_as_a_limit_without_phases_and_mxfp8_are(run_plan):
    with pytest.raises(ValueError, match=r"--host-memory-limit-gib 1: the flag's engine has .* lower --fraction"):
        plan_phases(estimate(8.0), 1)
    for wrong in ({"host_memory_limit_gib": 8.0}, {"host_memory_limit_gib": 0.0, "phases": True}):
        with pytest.raises(ValueError, match=r"--host-memory-limit-gib .*: use a number of GiB above 0, with --phases"):
            command.Settings("a job", **wrong)
    of_job = job(8.0, flag=False)
    of_job.config.optimizer.reuse_grad_buf_for_mxfp8_param_ag = True
    of_job.config.model.fp8_recipe = "mxfp8"
    of_job = replace(of_job, stages=[[[replace(tensor, quantized=True) for tensor in of_job.stages[0][0]]]])
    with pytest.raises(ValueError, match="mixed_precision=bf16_mixed"):
        run_plan(of_job)


@pytest.fixture
def run_plan(monkeypatch, capsys):
    """Returns a function that runs the command on a job, and returns its status and what it printed."""

    def run(of_job, **settings):
        monkeypatch.setattr(command, "read_job", lambda *arguments: of_job)
        status = command.run(command.Settings("a job", activations_gb=5.0, system="H200", phases=True, **settings))
        return status, " ".join(capsys.readouterr().out.split())

    return run


def test_the_command_prints_the_moves(run_plan):
    status, printed = run_plan(job(8.0, flag=False))
    assert status == 0 and "frees 144.00 GB: parameters 16.00, gradients 32.00, masters and moments 96.00" in printed
    assert "│ sleep, of an iteration │ 16.00 │ 0.00 │ 96.00 │ 112.00 │" in printed
    status, printed = run_plan(job(8.0, flag=False), json_output=True)
    found = json.loads(printed)["phases"]
    assert found == json.loads(json.dumps(plan_phases(estimate(8.0, 5.0, system="H200", flag=False)).as_json()))
    assert found["stages"][0]["moves"][0]["copied"] == 112 * GB


@pytest.mark.parametrize(
    "settings",
    [
        {"model.cuda_graph_impl": "transformer_engine"},
        {"model.vision_cuda_graph_impl": "transformer_engine"},
        {"ddp.overlap_param_gather": True, "ddp.use_distributed_optimizer": False, "optimizer.optimizer": "dist_muon"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_residency_would_refuse_is_said_and_has_status_1(run_plan, settings):
    of_job = job(8.0, flag=False)
    for setting, value in settings.items():
        section, _, name = setting.partition(".")
        setattr(getattr(of_job.config, section), name, value)
    status, printed = run_plan(of_job)
    refused, value = next(iter(settings.items()))
    assert status == 1 and f"refused by Residency: {refused}={value!r}" in printed
    assert "sleep, of an iteration" in printed
