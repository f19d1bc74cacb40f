"""What the plan says of sleeps and wakes, by the arithmetic of `Residency`'s bytes."""

import json
from dataclasses import replace

import pytest
from test_plan_verdict import MOMENTS, estimate, job, no_activations_counted  # noqa: F401 (a fixture)

from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.plan import command
from bridge_fgo.tools.plan.estimate import make_estimate
from bridge_fgo.tools.plan.phases import ALONE, REFERENCE, REST, SLEEP, SLEEP_ALL, WAKE_ALL, plan_phases
from bridge_fgo.tools.plan.systems import SYSTEMS, links

GB = 10**9


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
def test_seconds_are_bytes_over_the_link_that_a_gpu_has_beside_the_others_of_its_node_out_and_in_apart(system):
    parallel = Parallel(gpus=8, tensor=1, pipeline=1, context=1, expert=1, expert_tensor=1)
    ((link, seconds),) = plan_phases(estimate(8.0, system=system, flag=False, parallel=parallel)).seconds
    beside = SYSTEMS[system].link.of_node_with(SYSTEMS[system].link.gpus)
    assert (link.d2h, link.h2d) == (beside.d2h, beside.h2d)
    assert seconds[SLEEP] == pytest.approx(14 * GB / link.d2h)
    assert seconds[ALONE] == pytest.approx(2 * GB / link.h2d)


def test_with_the_flag_masters_leave_packed_and_weights_are_copied_for_them():
    (stage,) = plan_phases(estimate(8.0)).stages
    params, _, states = moves(stage)[WAKE_ALL]
    assert params == 16 * GB and states == pytest.approx(8 * 10.125 * GB, rel=0.001)
    (stage,) = plan_phases(estimate(8.0, offload=OffloadConfig(master_remainders=False), flag=False)).stages
    assert moves(stage)[WAKE_ALL] == (0, 0, 96 * GB)


def test_masters_of_transformer_engine_tell_nothing():
    of_job = job(8.0, flag=False)
    (held,) = of_job.held
    own = ("master", "master_param", "float32", True, False, False, False)
    of_adam = replace(held.optimizers[0], kinds=[[*MOMENTS, own]])
    of_job = replace(of_job, held=[replace(held, optimizers=[of_adam])])
    made = make_estimate(of_job, links=links("H200"), activations=GB)
    (stage,) = plan_phases(made).stages
    assert stage.untold == stage.shard == 16 * GB


def test_a_limit_below_what_the_flags_engine_has_is_refused_as_residency_does_and_without_phases_it_is_an_error():
    with pytest.raises(ValueError, match=r"--host-memory-limit-gib 1: the flag's engine has .* lower --fraction"):
        plan_phases(estimate(8.0), 1)
    for wrong in ({"host_memory_limit_gib": 8.0}, {"host_memory_limit_gib": 0.0, "phases": True}):
        with pytest.raises(ValueError, match=r"--host-memory-limit-gib .*: use a number of GiB above 0, with --phases"):
            command.Settings("a job", **wrong)


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


def test_what_residency_would_refuse_is_said_and_has_status_1(run_plan):
    of_job = job(8.0, flag=False)
    of_job.config.model.cuda_graph_impl = "transformer_engine"
    status, printed = run_plan(of_job)
    assert status == 1 and "refused by Residency: model.cuda_graph_impl='transformer_engine'" in printed
    assert "sleep, of an iteration" in printed


def test_weights_in_mxfp8_are_not_planned(run_plan):
    of_job = job(8.0, flag=False)
    of_job.config.optimizer.reuse_grad_buf_for_mxfp8_param_ag = True
    of_job.config.model.fp8_recipe = "mxfp8"
    of_job = replace(of_job, stages=[[[replace(tensor, quantized=True) for tensor in of_job.stages[0][0]]]])
    with pytest.raises(ValueError, match="mixed_precision=bf16_mixed"):
        run_plan(of_job)
