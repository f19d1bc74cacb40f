"""The model builder without a GPU, and the config's numbers, which have to come to the same tensors."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter

import built_jobs
import pytest
import torch
from test_plan_measured import RUNS

from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.demo import missing_packages
from bridge_fgo.tools.job.formula import stages_from_numbers
from bridge_fgo.tools.job.held import MXFP8_BYTES
from bridge_fgo.tools.job.job import job_of
from bridge_fgo.tools.plan.estimate import make_estimate

pytestmark = [
    pytest.mark.skipif(bool(missing_packages()), reason="builds Megatron-Bridge's models"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def answers(builder_is_forked, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the builder says of every config of `built_jobs`, from one process."""
    path = tmp_path_factory.mktemp("built") / "answers.json"
    done = builder_is_forked.run([sys.executable, built_jobs.__file__, str(path), *built_jobs.GPUS])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", ["dense", "moe", "latent", "biased", "fsdp"])
def test_numbers_come_to_the_tensors_of_bridges_model(answers, name):
    assert answers[name].get("error") is None and answers[name]["bridge_refuses"] is None
    job = job_of(answers[name])
    from_numbers = stages_from_numbers(job.config)
    assert len(job.stages) == len(from_numbers)
    for built, ours in zip(job.stages, from_numbers, strict=True):
        assert len(built) == len(ours)
        for chunk, our_chunk in zip(built, ours, strict=True):
            assert _sizes(chunk) == _sizes(our_chunk)
            assert any("kv_up" in tensor.name for tensor in our_chunk) is (name == "latent")


def _sizes(chunk):
    return Counter((tensor.numel, tensor.dtype, tensor.expert, tensor.own_bucket) for tensor in chunk)


def test_the_builder_says_whether_the_number_of_gpus_was_given(answers):
    assert job_of(answers["dense"]).gpus_given
    assert not job_of(answers["refused"]).gpus_given


def test_every_stage_and_virtual_chunk_is_built(answers):
    job = job_of(answers["dense"])
    assert [len(stage) for stage in job.stages] == [2, 2]
    names = [{tensor.name.split("layers.")[-1].split(".")[0] for tensor in chunk if "layers." in tensor.name}
             for stage in job.stages for chunk in stage]  # fmt: skip
    assert names == [{"0", "1"}] * 4, "two layers in each of four chunks"
    begins = [any("embedding" in tensor.name for tensor in chunk) for stage in job.stages for chunk in stage]
    assert begins == [True, False, False, False]


def test_states_of_all_ranks_are_those_of_the_whole_model(answers):
    job = job_of(answers["moe"])
    tensors = [tensor for stage in job.stages for chunk in stage for tensor in chunk]
    elements = sum(tensor.numel * (job.parallel.expert if tensor.expert else 1) for tensor in tensors)
    assert {tensor.expert for tensor in tensors} == {True, False}
    plan = make_estimate(job, OffloadConfig(), [], None, None)
    assert sum(sum(of_stage) for of_stage in plan.state_bytes_by_rank) == 12 * elements
    assert [stage.states.total for stage in plan.stages] == [max(ranks) for ranks in plan.state_bytes_by_rank]


def test_mxfp8_parameters_keep_fp32_masters_and_bf16_moments(answers):
    job = job_of(answers["mxfp8"])
    tensors = [tensor for chunk in job.stages[0] for tensor in chunk]
    quantized = [tensor for tensor in tensors if tensor.quantized]
    assert {tensor.name.split(".")[-1] for tensor in quantized} == {"weight"}
    assert not any("layernorm" in tensor.name or "embedding" in tensor.name for tensor in quantized)
    plan = make_estimate(job, OffloadConfig(), [], None, None)
    elements = sum(tensor.numel for tensor in tensors)
    assert sum(plan.state_bytes_by_rank[0]) == (4 + 2 + 2) * elements
    fp8 = sum(tensor.numel for tensor in quantized)
    kept = plan.stages[0].parameters
    assert math.isclose(kept, fp8 * MXFP8_BYTES + 2 * (elements - fp8), rel_tol=1e-3)


@pytest.mark.parametrize("name", RUNS)
def test_states_are_to_the_byte_those_of_runs_on_gpus(answers, name):
    job = job_of(answers[built_jobs.MEASURED[name]])
    assert job.held and not job.not_held
    plan = make_estimate(job, OffloadConfig(), [], None, None)
    assert plan.stages[0].states.total == plan.stages[0].states.offloaded == RUNS[name][2]
    assert not any("upper bounds" in note for note in plan.notes)


def test_megatron_fsdp_is_laid_out_by_its_own_parameter_groups(answers):
    job = job_of(answers["fsdp"])
    assert job.engine == "native" and not job.refusals and not job.not_held
    tensors = [tensor for chunk in job.stages[0] for tensor in chunk]
    whole = sum(tensor.numel for tensor in tensors)
    experts = sum(tensor.numel for tensor in tensors if ".experts." in tensor.name)
    plan = make_estimate(job, OffloadConfig(), [], None, None)
    # 8 ranks, 4 of which have the same experts; all are taken for the first, which has the least padding.
    for each, of_element in ((plan.stages[0].parameters, 2), (plan.stages[0].states.total, 12)):
        own = of_element * ((whole - experts) / 8 + experts / 4)
        assert own <= each <= 1.02 * own
    assert any("Megatron-FSDP: `other` is an upper bound" in note for note in plan.notes)


def test_megatron_fsdp_is_laid_out_with_tensor_parallelism_too(answers):
    job = job_of(answers["tensor_parallel_fsdp"])
    assert not job.not_held
    (own,) = [sum(tensor.numel for chunk in stage for tensor in chunk) * 12 / 4 for stage in job.stages]
    assert own <= make_estimate(job, OffloadConfig(), [], None, None).stages[0].states.total <= 1.02 * own


def test_what_mcore_cannot_lay_out_is_bounded_and_says_so(answers):
    job = job_of(answers["pipelined_fsdp"])
    assert job.held == [] and job.not_held  # its mesh has no pipeline
    plan = make_estimate(job, OffloadConfig(), [], None, None)
    assert any("upper bounds" in note and job.not_held in note for note in plan.notes)
    whole = sum(tensor.numel for stage in job.stages for chunk in stage for tensor in chunk)
    assert math.isclose(sum(map(sum, plan.state_bytes_by_rank)), 12 * whole, rel_tol=0.02)


def test_a_layer_wise_optimizer_deals_whole_parameters_out(answers):
    job = job_of(answers["dist_muon"])
    tensors = [tensor for chunk in job.stages[0] for tensor in chunk]
    plan = make_estimate(job, OffloadConfig(), [], None, None)
    assert sum(plan.state_bytes_by_rank[0]) == sum(tensor.numel * (8 if tensor.matrix else 12) for tensor in tensors)
    assert len(set(plan.state_bytes_by_rank[0])) > 1


def test_all_refusals_are_listed_at_once(answers):
    job = job_of(answers["refused"])
    assert job.flag and job.engine is None and job.bridge_refuses is None
    assert [text.split("=")[0] for text in job.refusals] == ["optimizer.optimizer_cuda_graph", "dist.use_torch_fsdp2"]


def test_a_vocabulary_that_nobody_knows_is_asked_for(answers):
    error = answers["unsized"]["error"]
    assert error.startswith("model.vocab_size") and "--vocab-size" in error


def test_what_bridge_refuses_and_what_cannot_be_found_are_told_apart(tmp_path):
    from bridge_fgo.tools.job.job import read_job

    with pytest.raises(ValueError, match=r"there is no recipe 'nowhere'.*run_config\.yaml"):
        read_job("nowhere", None, {})


def test_where_bridge_refuses_megatron_fsdp_what_it_takes_is_named():
    from bridge_fgo.tools.job.job import read_job

    refused = read_job("qwen3_30b_a3b_8gpu", None, {}, None, ["ddp.use_megatron_fsdp=true"]).bridge_refuses
    assert refused is not None and refused.endswith(
        "Set together ddp.use_megatron_fsdp=true checkpoint.ckpt_format=fsdp_dtensor "
        "ddp.data_parallel_sharding_strategy=optim_grads_params"
    )


def test_settings_that_numbers_do_not_know_are_an_error(answers):
    job = job_of(answers["dense"])
    job.config.model.mtp_num_layers = 1
    with pytest.raises(ValueError, match=r"model\.mtp_num_layers=1.*megatron-bridge"):
        stages_from_numbers(job.config)
    assert all(isinstance(tensor.dtype, torch.dtype) for stage in job.stages for chunk in stage for tensor in chunk)


@pytest.mark.parametrize(
    ("name", "gradients", "without", "peak"),
    [("one_microbatch", "lazy", 28.54, 21.97), ("two_microbatches", True, 57.75, 55.24)],
)
def test_gradients_leave_the_peak_that_was_measured(answers, name, gradients, without, peak):
    """GB on one H200; with True a prefetch more was ahead than is now, a bucket of 0.25 GB."""
    job = job_of(answers[name])
    for setting, measured in ((False, without), (gradients, peak)):
        (stage,) = make_estimate(job, OffloadConfig(gradients=setting), [], None, None).stages
        assert stage.least_budget == stage.offloaded_peak == pytest.approx(measured * 1e9, rel=0.03)
    assert stage.moving == (stage.gradients if gradients is True else 0)


def test_of_a_later_pipeline_stage_no_gradients_move_and_of_the_first_those_of_its_first_chunk(answers):
    job = job_of(answers["interleaved"])
    assert [len(held.buckets) for held in job.held] == [8, 2]
    for held in job.held:
        assert sum(nbytes for _, nbytes in held.buckets) == held.gradients
    plan = make_estimate(job, OffloadConfig(gradients=True), [], None, None)
    first, second = plan.stages
    assert 0 < first.moving < first.gradients and second.moving == second.spared == 0
    assert any("stage 1" in note and "3.28 GB" in note for note in plan.notes)
