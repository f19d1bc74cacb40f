"""The model builder without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from built_jobs import FSDP, SMALL, answer, job

from bridge_fgo.bridge.compat import source_of
from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.job import answers, kept_files
from bridge_fgo.tools.job.job import read_job
from bridge_fgo.tools.plan.estimate import make_estimate
from harness.bench.presets import PRESETS

pytestmark = pytest.mark.slow


def bytes_by_rank(of_job):
    """Return a job's estimate, and the bytes of all states of each rank of each stage."""
    plan = make_estimate(of_job)
    return plan, [[of_rank.total for of_rank in of_stage] for of_stage in plan.states]


def test_every_stage_and_virtual_chunk_is_built():
    dense = job(f"{SMALL} --tp 2 --pp 2 --vpp 2", 16)
    assert dense.gpus_given and [len(stage) for stage in dense.stages] == [2, 2]
    chunks = [[tensor.name for tensor in chunk] for stage in dense.stages for chunk in stage]
    layers = [{name.split("layers.")[1].split(".")[0] for name in chunk if "layers." in name} for chunk in chunks]
    assert layers == [{"0", "1"}] * 4, "two layers in each of four chunks"
    begins = [any("embedding" in name for name in chunk) for chunk in chunks]
    assert begins == [True, False, False, False]


def test_states_of_all_ranks_are_those_of_the_whole_model():
    of_experts = job(
        f"{SMALL} --experts 8 --ep 4 --pp 2 --grouped-experts", 16, "model.moe_shared_expert_intermediate_size=128"
    )
    tensors = [tensor for stage in of_experts.stages for chunk in stage for tensor in chunk]
    elements = sum(tensor.numel * (of_experts.parallel.expert if tensor.expert else 1) for tensor in tensors)
    assert {tensor.expert for tensor in tensors} == {True, False}
    plan, totals = bytes_by_rank(of_experts)
    assert sum(map(sum, totals)) == 12 * elements
    assert [stage.states.total for stage in plan.stages] == [max(ranks) for ranks in totals]


def test_mxfp8_parameters_keep_fp32_masters_and_bf16_moments():
    options = f"{SMALL} --precision-aware --moments-dtype bf16"
    mxfp8 = job(options, 4, "mixed_precision=bf16_with_mxfp8_mixed")
    tensors = mxfp8.tensors(0)
    quantized = [tensor for tensor in tensors if tensor.quantized]
    assert {tensor.name.split(".")[-1] for tensor in quantized} == {"weight"}
    assert not any("layernorm" in tensor.name or "embedding" in tensor.name for tensor in quantized)
    plan, (totals,) = bytes_by_rank(mxfp8)
    elements = sum(tensor.numel for tensor in tensors)
    assert sum(totals) == (4 + 2 + 2) * elements
    fp8 = sum(tensor.numel for tensor in quantized)
    assert plan.stages[0].parameters == pytest.approx(fp8 * 2.0625 + 2 * (elements - fp8), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "gpus", "ranks", "of_experts"),
    [(f"{FSDP} --experts 8 --ep 2", 8, 8, 4), (f"{FSDP} --tp 2", 8, 4, 4), ("latent_fsdp", 4, 4, 4)],
)
def test_megatron_fsdp_is_laid_out_by_its_own_parameter_groups(name, gpus, ranks, of_experts):
    """Dense parameters over so many ranks, experts over fewer; latent attention asks layers for `parallel_mode`."""
    of_fsdp = job(name, gpus)
    assert of_fsdp.engine == "native" and not of_fsdp.refusals and not of_fsdp.not_held
    tensors = of_fsdp.tensors(0)
    whole = sum(tensor.numel for tensor in tensors)
    experts = sum(tensor.numel for tensor in tensors if ".experts." in tensor.name)
    assert bool(experts) == ("--experts" in name) and any("q_down" in t.name for t in tensors) == (
        name == "latent_fsdp"
    )
    plan = make_estimate(of_fsdp)
    # All ranks are taken for the first, which has the least padding.
    for each, of_element in ((plan.stages[0].parameters, 2), (plan.stages[0].states.total, 12)):
        own = of_element * ((whole - experts) / ranks + experts / of_experts)
        assert own <= each <= 1.02 * own
    assert any("Megatron-FSDP: `other` is an upper bound" in note for note in plan.notes)
    if name == f"{FSDP} --tp 2":
        of_fp8 = job(f"{name} --fp8-weights tensorwise", gpus, "ddp.nccl_ub=true")
        quantized = make_estimate(of_fp8).stages[0]
        # FP8 weights are a parameter group of their own, so that the first rank's part ends at another parameter.
        assert quantized.states.total == pytest.approx(plan.stages[0].states.total, rel=0.01) and not of_fp8.not_held
        assert quantized.parameters < 0.8 * plan.stages[0].parameters


def test_a_model_that_offloads_the_activations_of_layers_is_built_and_they_are_counted():
    of_layers = job(f"{SMALL} --cpu-offloading-layers 2")
    assert of_layers.config.model.cpu_offloading is True
    plan = make_estimate(of_layers)
    assert plan.stages[0].activations is not None
    assert any("that Transformer Engine offloads are on the host" in note for note in plan.notes)
    for name, value, told in (
        ("fp8", "hybrid", "cpu_offloading=True and FP8 or Megatron-FSDP"),
        ("mtp_num_layers", 1, "mtp_num_layers=1"),
    ):
        setattr(of_layers.config.model, name, value)
        notes = make_estimate(of_layers).notes
        assert any(note.startswith(f"activations are not counted with model.{told}: peaks are lower") for note in notes)


def test_a_layer_wise_optimizer_deals_whole_parameters_out():
    of_muon = job(f"{SMALL} --optimizer dist_muon --no-distributed", 4)
    _, (totals,) = bytes_by_rank(of_muon)

    def is_muons(tensor):
        return "layer_norm" not in tensor.name and ".layers." in tensor.name

    assert sum(totals) == sum(tensor.numel * (8 if is_muons(tensor) else 12) for tensor in of_muon.tensors(0))
    assert len(set(totals)) > 1


@pytest.mark.parametrize("name", ["adapters", "adapters_of_experts"])
def test_adapters_have_the_states_and_the_frozen_model_none(name):
    """Wherever the weights are that Bridge would load: none are read here."""
    options = f"{SMALL} --experts 8 --ep 2 --grouped-experts" if "experts" in name else SMALL
    of_lora, whole = job(name, 4), job(options, 4)
    plan, (totals,) = bytes_by_rank(of_lora)
    trained = [tensor for tensor in of_lora.tensors(0) if tensor.trainable]
    assert trained and all(".adapter." in tensor.name for tensor in trained)
    shared = of_lora.parallel.expert
    assert sum(totals) == 12 * sum(tensor.numel * (shared if tensor.expert else 1) for tensor in trained)
    frozen = [tensor.numel for tensor in of_lora.tensors(0) if not tensor.trainable]
    assert sum(frozen) == sum(tensor.numel for tensor in whole.tensors(0))
    assert plan.stages[0].parameters >= 2 * sum(frozen) and not plan.knows_activations
    assert any(note.startswith("activations are not counted with peft=LoRA: peaks are") for note in plan.notes)
    mxfp8 = job(name, 4, "mixed_precision=bf16_with_mxfp8_mixed")
    numel = [
        sum(t.numel for t in mxfp8.tensors(0) if not t.trainable and t.quantized is kind) for kind in (True, False)
    ]
    trained = sum(2 * tensor.numel for tensor in trained)
    assert make_estimate(mxfp8).stages[0].parameters - trained == pytest.approx(
        2.0625 * numel[0] + 2 * numel[1], rel=0.01
    )


@pytest.mark.skipif(source_of("megatron.bridge.models.gpt.model_config") is None, reason="of Bridge 0.7")
def test_a_model_that_a_builder_builds_is_laid_out_as_it_was_by_a_provider():
    provided = kept_files.read(answers.FOLDER / "llama3_70b_64gpu.json.gz")["answer"]
    built = answers.ask_builder("llama3_70b_64gpu")
    assert "transformer" in built["config"]["model"]
    assert [built[name] for name in ("stages", "held", "refusals")] == [
        provided[name] for name in ("stages", "held", "refusals")
    ]
    shards = ["model.transformer.tensor_parallel_num_weight_shards=4"]  # twice the tensor parallel ranks
    (refusal,) = answers.ask_builder("llama3_70b_64gpu", overrides=shards)["refusals"]
    assert refusal.startswith("model.transformer.gtp_weight_remat_size=2 with ")


def test_what_cannot_be_built_or_laid_out_or_is_refused_is_told_with_the_setting():
    error = answer("without_layers")["error"]
    assert error.startswith("model.transformer_layer_spec=None: ") and "leave the line out of the config" in error
    error = answer(SMALL, 1, "model.vocab_size=null", "tokenizer.vocab_size=null")["error"]
    assert error.startswith("model.vocab_size") and "--vocab-size" in error
    with pytest.raises(ValueError, match=r"there is no recipe 'nowhere'.*run_config\.yaml"):
        read_job("nowhere", None, {})
    text = r"fsdp=True with model.pipeline_model_parallel_size=2: .*\(EinopsError: .*; use model.pipeline_model_paral"
    with pytest.raises(ValueError, match=text):
        make_estimate(job(f"{FSDP} --pp 2", 8))
    refused = job(SMALL, None, "optimizer.optimizer_cuda_graph=true", "dist.use_torch_fsdp2=true")
    assert refused.flag and refused.engine is None and refused.bridge_refuses is None and not refused.gpus_given
    assert [why.split("=")[0] for why in refused.refusals] == ["optimizer.optimizer_cuda_graph", "dist.use_torch_fsdp2"]


def test_deepeps_experts_are_laid_out_without_a_gpu_and_what_bridge_takes_of_megatron_fsdp_is_named():
    of_recipe = read_job("qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config", None, {})
    assert of_recipe.config.model.moe_flex_dispatcher_backend == "deepep"
    assert of_recipe.bridge_refuses is None and not of_recipe.not_held
    refused = read_job("qwen3_30b_a3b_8gpu", None, {}, None, ["ddp.use_megatron_fsdp=true"]).bridge_refuses
    assert refused is not None and refused.endswith(
        "Set together ddp.use_megatron_fsdp=true checkpoint.ckpt_format=fsdp_dtensor "
        "ddp.data_parallel_sharding_strategy=optim_grads_params"
    )


def test_of_a_later_stage_no_gradients_move_and_of_the_first_those_of_its_first_chunk():
    interleaved = job(f"{PRESETS['short']} --gbs 16 --pp 2 --vpp 2 --offload on", 2)
    assert [len(held.buckets) for held in interleaved.held] == [8, 2]
    for held in interleaved.held:
        assert sum(nbytes for _, nbytes in held.buckets) == held.gradients
    plan = make_estimate(interleaved, OffloadConfig(gradients=True))
    first, second = plan.stages
    assert 0 < first.moving < first.gradients and second.moving == second.spared == 0
    assert any("stage 1" in note and "3.28 GB" in note for note in plan.notes)


USES_SCIPY = """
from scipy.special import comb
from bridge_fgo.recipes.tiny import tiny_config

def config():
    found = tiny_config(on_cpu=False)
    found.model.num_layers = comb(3, 2, exact=True)
    return found
"""


def test_a_config_that_uses_what_the_builder_has_hollow_is_built_with_the_package_as_it_is(tmp_path):
    (tmp_path / "mine.py").write_text(USES_SCIPY)
    request = {"target": "mine.py:config", "gpus": None, "offload": {}, "vocab_size": None, "overrides": []}
    words = [sys.executable, "-m", "bridge_fgo.tools.job.builder", json.dumps(request | {"patches": False})]
    path = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, cwd=tmp_path, env=path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["config"]["model"]["num_layers"] == 3
