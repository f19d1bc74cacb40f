"""The model builder without a GPU."""

import gzip
import json
import math

import built_jobs
import pytest

from bridge_fgo.bridge.compat import source_of
from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.demo import missing_packages
from bridge_fgo.tools.job import answers
from bridge_fgo.tools.job.held import MXFP8_BYTES
from bridge_fgo.tools.plan.estimate import make_estimate

pytestmark = [pytest.mark.skipif(bool(missing_packages()), reason="builds Megatron-Bridge's models"), pytest.mark.slow]


def test_the_builder_says_whether_the_number_of_gpus_was_given():
    assert built_jobs.job("dense", 16).gpus_given
    assert not built_jobs.job("refused", None, "optimizer.optimizer_cuda_graph=true").gpus_given


def test_every_stage_and_virtual_chunk_is_built():
    job = built_jobs.job("dense", 16)
    assert [len(stage) for stage in job.stages] == [2, 2]
    names = [{tensor.name.split("layers.")[-1].split(".")[0] for tensor in chunk if "layers." in tensor.name}
             for stage in job.stages for chunk in stage]  # fmt: skip
    assert names == [{"0", "1"}] * 4, "two layers in each of four chunks"
    begins = [any("embedding" in tensor.name for tensor in chunk) for stage in job.stages for chunk in stage]
    assert begins == [True, False, False, False]


def test_states_of_all_ranks_are_those_of_the_whole_model():
    job = built_jobs.job("moe", 16)
    tensors = [tensor for stage in job.stages for chunk in stage for tensor in chunk]
    elements = sum(tensor.numel * (job.parallel.expert if tensor.expert else 1) for tensor in tensors)
    assert {tensor.expert for tensor in tensors} == {True, False}
    plan = make_estimate(job, OffloadConfig(), [], None, None)
    assert sum(sum(of_stage) for of_stage in plan.state_bytes_by_rank) == 12 * elements
    assert [stage.states.total for stage in plan.stages] == [max(ranks) for ranks in plan.state_bytes_by_rank]


def test_mxfp8_parameters_keep_fp32_masters_and_bf16_moments():
    job = built_jobs.job("mxfp8", 4)
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


@pytest.mark.parametrize(
    ("name", "gpus", "ranks", "of_experts"),
    [("fsdp", 8, 8, 4), ("tensor_parallel_fsdp", 8, 4, 4), ("latent_fsdp", 4, 4, 4)],
)
def test_megatron_fsdp_is_laid_out_by_its_own_parameter_groups(name, gpus, ranks, of_experts):
    """Dense parameters over so many ranks, experts over fewer; latent attention asks layers for `parallel_mode`."""
    job = built_jobs.job(name, gpus)
    assert job.engine == "native" and not job.refusals and not job.not_held
    tensors = job.tensors(0)
    whole = sum(tensor.numel for tensor in tensors)
    experts = sum(tensor.numel for tensor in tensors if ".experts." in tensor.name)
    assert bool(experts) == (name == "fsdp") and any("q_down" in t.name for t in tensors) == (name == "latent_fsdp")
    plan = make_estimate(job, OffloadConfig(), [], None, None)
    # All ranks are taken for the first, which has the least padding.
    for each, of_element in ((plan.stages[0].parameters, 2), (plan.stages[0].states.total, 12)):
        own = of_element * ((whole - experts) / ranks + experts / of_experts)
        assert own <= each <= 1.02 * own
    assert any("Megatron-FSDP: `other` is an upper bound" in note for note in plan.notes)


def test_megatron_fsdp_is_laid_out_with_fp8_weights_and_nccls_memory_too():
    jobs = [built_jobs.job(name, 8) for name in ("dense_fsdp", "quantized_fsdp")]
    assert [job.not_held for job in jobs] == ["", ""]
    plain, quantized = (make_estimate(job, OffloadConfig(), [], None, None).stages[0] for job in jobs)
    # FP8 weights are a parameter group of their own, so that the first rank's part ends at another parameter.
    assert quantized.states.total == pytest.approx(plain.states.total, rel=0.01)
    assert quantized.parameters < 0.8 * plain.parameters


def test_what_mcore_cannot_lay_out_is_an_error_with_the_reason():
    job = built_jobs.job("pipelined_fsdp", 8)
    text = (
        r"fsdp=True with model.pipeline_model_parallel_size=2: .*\(EinopsError: .*; use model.pipeline_model_parallel"
    )
    with pytest.raises(ValueError, match=text):
        make_estimate(job, OffloadConfig(), [], None, None)


def test_a_model_that_offloads_the_activations_of_layers_is_built_and_they_are_counted():
    job = built_jobs.job("offloads_activations")
    assert job.config.model.cpu_offloading is True
    plan = make_estimate(job, OffloadConfig(), [], None, None)
    assert plan.stages[0].activations is not None
    assert any("that Transformer Engine offloads are on the host" in note for note in plan.notes)
    for name, value, told in (
        ("fp8", "hybrid", "cpu_offloading=True and FP8 or Megatron-FSDP"),
        ("mtp_num_layers", 1, "mtp_num_layers=1"),
    ):
        setattr(job.config.model, name, value)
        notes = make_estimate(job, OffloadConfig(), [], None, None).notes
        assert any(note.startswith(f"activations are not counted with model.{told}: peaks are lower") for note in notes)


def test_a_layer_wise_optimizer_deals_whole_parameters_out():
    job = built_jobs.job("dist_muon", 4)
    tensors = job.tensors(0)
    plan = make_estimate(job, OffloadConfig(), [], None, None)

    def is_muons(tensor):
        return "layer_norm" not in tensor.name and ".layers." in tensor.name

    assert sum(plan.state_bytes_by_rank[0]) == sum(tensor.numel * (8 if is_muons(tensor) else 12) for tensor in tensors)
    assert len(set(plan.state_bytes_by_rank[0])) > 1


@pytest.mark.skipif(source_of("megatron.bridge.models.gpt.model_config") is None, reason="of Bridge 0.7")
def test_a_model_that_a_builder_builds_is_laid_out_as_it_was_by_a_provider():
    provided = json.loads(gzip.decompress((answers.FOLDER / "llama3_70b_64gpu.json.gz").read_bytes()))["answer"]
    built = answers.ask_builder("llama3_70b_64gpu")
    assert "transformer" in built["config"]["model"]
    assert [built[name] for name in ("stages", "held", "refusals")] == [
        provided[name] for name in ("stages", "held", "refusals")
    ]
    shards = ["model.transformer.tensor_parallel_num_weight_shards=4"]  # twice the tensor parallel ranks
    (refusal,) = answers.ask_builder("llama3_70b_64gpu", overrides=shards)["refusals"]
    assert refusal.startswith("model.transformer.gtp_weight_remat_size=2 with ")


def test_all_refusals_are_listed_at_once():
    job = built_jobs.job("refused", None, "optimizer.optimizer_cuda_graph=true")
    assert job.flag and job.engine is None and job.bridge_refuses is None
    assert [text.split("=")[0] for text in job.refusals] == ["optimizer.optimizer_cuda_graph", "dist.use_torch_fsdp2"]


def test_layers_of_no_function_are_an_error_that_names_the_setting():
    error = built_jobs.answer("without_layers")["error"]
    assert error.startswith("model.transformer_layer_spec=None: ") and "leave the line out of the config" in error


def test_a_vocabulary_that_nobody_knows_is_asked_for():
    error = built_jobs.answer("unsized")["error"]
    assert error.startswith("model.vocab_size") and "--vocab-size" in error


def test_what_bridge_refuses_and_what_cannot_be_found_are_told_apart(tmp_path):
    from bridge_fgo.tools.job.job import read_job

    with pytest.raises(ValueError, match=r"there is no recipe 'nowhere'.*run_config\.yaml"):
        read_job("nowhere", None, {})


def test_a_recipe_whose_experts_get_their_tokens_by_deepep_is_laid_out_without_a_gpu():
    from bridge_fgo.tools.job.job import read_job

    job = read_job("qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config", None, {})
    assert job.config.model.moe_flex_dispatcher_backend == "deepep"
    assert job.bridge_refuses is None and not job.not_held


def test_where_bridge_refuses_megatron_fsdp_what_it_takes_is_named():
    from bridge_fgo.tools.job.job import read_job

    refused = read_job("qwen3_30b_a3b_8gpu", None, {}, None, ["ddp.use_megatron_fsdp=true"]).bridge_refuses
    assert refused is not None and refused.endswith(
        "Set together ddp.use_megatron_fsdp=true checkpoint.ckpt_format=fsdp_dtensor "
        "ddp.data_parallel_sharding_strategy=optim_grads_params"
    )


@pytest.mark.parametrize(
    ("name", "gradients", "without", "peak"),
    [("one_microbatch", "lazy", 28.54, 21.97), ("two_microbatches", True, 57.75, 55.24)],
)
def test_gradients_leave_the_peak_that_was_measured(name, gradients, without, peak):
    """GB on one H200; with True a prefetch more was ahead than is now, a bucket of 0.25 GB."""
    job = built_jobs.job(name)
    for setting, measured in ((False, without), (gradients, peak)):
        (stage,) = make_estimate(job, OffloadConfig(gradients=setting), [], None, None).stages
        assert stage.least_budget == stage.offloaded_peak == pytest.approx(measured * 1e9, rel=0.03)
    assert stage.moving == (stage.gradients if gradients is True else 0)


def test_of_a_later_pipeline_stage_no_gradients_move_and_of_the_first_those_of_its_first_chunk():
    job = built_jobs.job("interleaved", 2)
    assert [len(held.buckets) for held in job.held] == [8, 2]
    for held in job.held:
        assert sum(nbytes for _, nbytes in held.buckets) == held.gradients
    plan = make_estimate(job, OffloadConfig(gradients=True), [], None, None)
    first, second = plan.stages
    assert 0 < first.moving < first.gradients and second.moving == second.spared == 0
    assert any("stage 1" in note and "3.28 GB" in note for note in plan.notes)
