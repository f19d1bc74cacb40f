"""`plan` has runs' states to the byte, and their peaks within 2%.

Bytes are what `bridge-fgo bench` and the GPU tests printed; the configs are theirs. Peaks of the first short steps
were the optimizer step's in two of the small runs offloaded, which are left out.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from built_jobs import job

from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.job.job import read_job
from bridge_fgo.tools.plan.activations import activation_bytes, backward_of, copied_bytes, tokens_of
from bridge_fgo.tools.plan.estimate import make_estimate
from bridge_fgo.tools.plan.systems import floor_seconds, links
from harness.bench.presets import PRESETS

RAN_ON = "CPU, against runs on one H200"

pytestmark = pytest.mark.slow

SMALL = "--layers 4 --hidden 1024 --heads 16 --seq 1024 --mbs 2 --gbs 8"
MANY_ACTIVATIONS = "--layers 4 --hidden 1024 --heads 16 --seq 2048 --mbs 4 --gbs 16"

# options, GPUs, states of a rank, peak allocated resident, and offloaded
RUNS = {
    "24 layers": (f"{PRESETS['short']} --gbs 8", 1, 19_693_461_504, 48_230_038_528, 28_536_577_024),
    "24 layers, DP=2": (f"{PRESETS['short']} --gbs 16", 2, 9_846_730_752, 38_383_307_776, 28_536_577_024),
    "long sequences, attention recomputed": (
        f"{PRESETS['long']} --gbs 6", 1, 19_693_461_504, 109_995_962_368, 90_302_500_864
    ),
    "4 layers": (SMALL, 1, 1_541_517_312, 3_555_314_688, None),
    "4 layers, DP=2": (SMALL, 2, 770_758_656, 2_784_555_008, None),
    "4 layers, TP=2": (f"{SMALL} --tp 2", 2, 770_813_952, 1_833_534_464, None),
    "4 layers, bf16 moments and 16-bit remainders": (
        f"{SMALL} --precision-aware --moments-dtype bf16", 1, 770_758_656, 2_784_583_680, None
    ),
    "4 layers, larger microbatches": (MANY_ACTIVATIONS, 1, 1_541_517_312, 8_051_442_688, 6_509_925_376),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_states_are_exact_and_peaks_within_two_percent(name):
    options, gpus, states, resident, offloaded = RUNS[name]
    stage = make_estimate(job(options, gpus)).stages[0]
    assert stage.states.total == stage.states.offloaded == states
    assert stage.peak(0) == pytest.approx(resident, rel=0.02)
    if offloaded is not None:
        assert stage.peak(states) == pytest.approx(offloaded, rel=0.02)


EXPERTS = "--layers 4 --hidden 1024 --heads 16 --seq 1024 --mbs 2 --gbs 4 --experts 4 --topk 2"
GROUPED = f"{EXPERTS} --grouped-experts"
SHARED = ("model.moe_shared_expert_intermediate_size=1024", "model.moe_router_dtype=fp32")
FUSED = {"bias_activation_fusion": True, "moe_permute_fusion": True}
ATTENTION = ["core_attn", "attn_proj", "mlp_norm", "qkv_linear"]
LARGE = "--layers 4 --hidden 2048 --ffn 8192 --heads 16 --seq 2048 --mbs 2 --gbs 8"
LONG = "--layers 16 --hidden 2048 --ffn 8192 --heads 16 --seq 8192 --mbs 3 --gbs 3 --recompute attention --vocab 8192"


def recomputed(*modules: str) -> dict[str, object]:
    return {**FUSED, "recompute_granularity": "selective", "recompute_modules": [*modules]}


def offloaded(*modules: str) -> dict[str, object]:
    return {"fine_grained_activation_offloading": True, "offload_modules": [*modules]}


# job, overrides, settings that change no tensor of the model, peak allocated resident, and how near it is; with unfused
# attention. Then with modules whose activations mcore offloads, and with two of four layers that TE offloads.
PEAKS = {
    "each fused into none": (GROUPED, (), {}, 6_945_398_272, 0.01),
    "each by itself, activation fused": (EXPERTS, (), {"bias_activation_fusion": True}, 6_408_523_264, 0.01),
    "activation and permutation fused": (GROUPED, (), FUSED, 6_509_227_520, 0.01),
    "attention, norms and activation recomputed": (
        GROUPED, (), recomputed("core_attn", "layernorm", "moe_act"), 6_098_152_960, 0.01
    ),
    "shared experts": (GROUPED, SHARED, FUSED, 6_786_149_888, 0.01),
    "shared experts, activation recomputed": (GROUPED, SHARED, recomputed("moe_act"), 6_651_932_160, 0.01),
    "shared experts, all experts recomputed": (GROUPED, SHARED, recomputed("moe"), 6_299_151_872, 0.01),
    "8 experts, 4 a token, permutation not fused": (
        "--layers 4 --hidden 1024 --heads 16 --seq 1024 --mbs 2 --gbs 4 --experts 8 --topk 4 --grouped-experts",
        SHARED, {"bias_activation_fusion": True}, 10_914_422_272, 0.01
    ),
    "latent attention, projections recomputed": (
        "latent_experts", SHARED, recomputed("mla_up_proj"), 6_725_908_480, 0.01
    ),
    "dense, offloaded": (LARGE, (), offloaded(*ATTENTION), 9_680_000_000, 0.02),
    "experts, offloaded": (GROUPED, (), offloaded(*ATTENTION, "expert_fc1", "moe_act"), 6_130_000_000, 0.02),
    "attention recomputed, offloaded": (LONG, (), offloaded("qkv_linear"), 73_141_000_000, 0.02),
    "dense layers offloaded": (f"{MANY_ACTIVATIONS} --cpu-offloading-layers 2", (), {}, 6_424_052_736, 0.01),
    "layers of experts offloaded": (
        f"{MANY_ACTIVATIONS} --experts 4 --topk 2 --grouped-experts --cpu-offloading-layers 2",
        (), {}, 10_621_803_008, 0.01
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_of_experts_of_recomputation_and_of_activation_offload_are_those_that_were_measured(name):
    options, overrides, model, measured, near = PEAKS[name]
    of_job = job(options, 1, *overrides)
    without = activation_bytes(of_job, 0)
    vars(of_job.config.model).update(model)
    (stage,) = make_estimate(of_job).stages
    assert stage.peak(0) == pytest.approx(measured, rel=near)
    if "offload_modules" in model:
        assert stage.activations < without
        for unknown in (
            {"offload_modules": ["attn_norm"]},
            {"activation_offload_fraction": 0.5},
            {"min_offloaded_tensor_size": 2**26},
        ):
            vars(of_job.config.model).update(model | unknown)
            assert activation_bytes(of_job, 0) is None
            vars(of_job.config.model).update(activation_offload_fraction=1.0, min_offloaded_tensor_size=2**20)
    if of_job.config.model.cpu_offloading:
        at_loss = []
        for count in (2, 1, 0):
            of_job.config.model.cpu_offloading_num_layers = count
            at_loss.append(backward_of(of_job, 0).most[0][0])
        the_input = tokens_of(of_job) * of_job.config.model.hidden_size * 2
        assert at_loss[1] - at_loss[0] == at_loss[2] - at_loss[1] + the_input, "the model's input stays"


FOUR = "--layers 4 --hidden 2048 --ffn 4096 --heads 16 --seq 2048 --mbs 4 --gbs 16 --recompute attention --vocab 8192"


def test_a_layer_is_back_before_its_backward_and_what_is_not_offloaded_is_not_counted_as_such():
    of_job = job(LARGE, 1)
    model = of_job.config.model
    vars(model).update(offloaded("qkv_linear"))
    third, second, first = (nbytes for nbytes, _ in backward_of(of_job, 0).most[-3:])
    moved = copied_bytes(of_job, 0)[0]
    assert (second - first) - (third - second) == moved > 0, "beside the second's backward the first one is prefetched"
    model.min_offloaded_tensor_size = moved // 2 // 2  # elements of each of its two tensors
    assert copied_bytes(of_job, 0)[0] == moved
    model.min_offloaded_tensor_size += 1
    assert not any(copied_bytes(of_job, 0))
    latent = job("latent_experts", 1)
    for modules, is_counted in ((["attn_proj"], True), (["qkv_linear"], False)):
        vars(latent.config.model).update(offloaded(*modules))
        assert (activation_bytes(latent, 0) is not None) is is_counted


def test_the_host_memory_that_mcore_pins_for_activations_is_what_a_run_pinned():
    of_job = job(f"{FOUR} --experts 8 --topk 2 --grouped-experts", 1)
    vars(of_job.config.model).update(fine_grained_activation_offloading=True, offload_modules=["expert_fc1", "moe_act"])
    plan = make_estimate(of_job, links=links("H200"))
    (stage,) = plan.stages
    batches = 2 * 4 * 2048**2  # the masks of two, which the loader pins
    assert stage.copies + batches == pytest.approx(2.28 * 2**30, abs=0.005 * 2**30)
    assert max(plan.pinned) == plan.links[0].pinned == stage.states.offloaded + stage.copies


def test_the_host_memory_that_transformer_engine_pins_is_counted_by_tensor_in_powers_of_two():
    of_job = job(f"{MANY_ACTIVATIONS} --cpu-offloading-layers 2", 1)
    model = of_job.config.model

    def pinned():
        found = make_estimate(of_job)
        assert max(found.pinned) == found.stages[0].states.offloaded + found.stages[0].copies
        return found.stages[0].copies

    # A tensor of the hidden size has 16 MiB; 4 of norms and the attention's output are saved, scores, and of the MLP 3.
    of_layer = 5 * 16 + 16 * 2**13 * 2**11 * 2 // 2**20 + 3 * 64
    assert pinned() == 2 * of_layer * 2**20
    model.ffn_hidden_size = 2080  # 32.5 MiB
    assert pinned() == 2 * of_layer * 2**20, "a block of 64 MiB too"
    model.ffn_hidden_size = 2048
    assert pinned() == 2 * (of_layer - 3 * 32) * 2**20
    model.ffn_hidden_size = 16  # 2^17 elements: none of these leaves
    assert pinned() == 2 * (of_layer - 3 * 64) * 2**20
    for fp8, told in (
        (None, "1.24 GB a rank"),
        ("hybrid", "bytes that are not known (activations are not counted with model.cpu_offloading=True and FP8"),
    ):
        model.fp8 = fp8
        text = f"activations: Transformer Engine offloads some, and pins {told}"
        assert any(note.startswith(text) for note in make_estimate(of_job).notes)


def activations(options: str, **model: object) -> int:
    of_job = job(f"{options} --vocab 128", 1)
    vars(of_job.config.model).update({"recompute_granularity": "selective", **model})
    (stage,) = make_estimate(of_job).stages
    return stage.activations


def test_layers_that_are_recomputed_together_are_held_together_and_mlps_apart_from_experts():
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    one, two, all_four, of_eight = (activations(SMALL, **full, recompute_num_layers=n) for n in (1, 2, 4, 8))
    assert one < two < all_four == of_eight == activations(SMALL, recompute_granularity=None)
    # Of a group the input of its first layer alone is kept: of four layers 4 inputs, 2, or 1.
    layer_input = 2 * 1024 * 1024 * 2
    assert (all_four - two) - 2 * (two - one) == 3 * layer_input
    # Layers of two model chunks are not recomputed together.
    of_chunk, over = (
        activations(SMALL, **full, virtual_pipeline_model_parallel_size=2, recompute_num_layers=n) for n in (2, 4)
    )
    assert of_chunk == over
    for options, module, other in ((SMALL, "mlp", "moe"), (f"{SMALL} --experts 4", "moe", "mlp")):
        nothing, without = (activations(options, recompute_modules=[name]) for name in ("none", other))
        assert without == nothing > activations(options, recompute_modules=[module])


def test_each_module_that_is_recomputed_alone_spares_what_it_keeps_and_experts_are_not_spared_twice():
    of_job = read_job("kimi_k2_256gpu_gb300", None, {})

    def peak(*modules: str) -> int:
        vars(of_job.config.model).update(recompute_granularity="selective", recompute_modules=list(modules))
        found = activation_bytes(of_job, 1)
        assert found is not None
        return found

    for module in ("layernorm", "mla_up_proj", "moe_act", "shared_experts", "moe"):
        assert peak(module) < peak("core_attn"), f"{module}: of fused attention nothing is spared"
    assert peak("moe", "moe_act", "shared_experts") == peak("moe")
    tokens, layers = 2 * 4096, 17 * 4 - 1  # those of 17 chunks in flight, without the one whose backward runs
    assert peak("core_attn") - peak("mla_up_proj") == layers * tokens * 2 * 64 * (2 * 192 + 256)


def test_copies_hide_behind_a_forward_that_is_longer():
    of_job = job(f"{PRESETS['long']} --gbs 6", 1)
    (bare,) = make_estimate(of_job, OffloadConfig(master_remainders=True), links("H200")).links
    assert bare.link_seconds == pytest.approx(0.3, abs=1e-3)
    assert bare.most_floor == pytest.approx(16.62e9 / 50.8e9, rel=1e-3), "measured: 16.62 GB were copied each way"
    (bare,) = make_estimate(of_job, links=links("H200")).links
    assert bare.link_seconds == pytest.approx(0.3555, abs=1e-3)
    assert bare.most_floor == pytest.approx(19_693_461_504 / 50.8e9)
    assert bare.hidden_from == bare.link_seconds
    (hidden,) = make_estimate(of_job, OffloadConfig(), links("H200"), 0.75, None).links
    assert hidden.floor == 0.0, "measured: a step of 4.536 s took 4.559 s"
    (given,) = make_estimate(of_job, OffloadConfig(), links(None, 10.0, 4), 0.75, None).links
    assert (given.link.name, given.link.gpus) == ("given", 4) and given.floor > 0


def test_the_floor_is_of_one_stages_bytes_and_room():
    of_job = job(f"{PRESETS['short']} --gbs 8 --pp 4", 4)
    (last,) = of_job.stages[-1]  # the stage with the least activations gets the fewest states too
    of_job.stages[-1] = [[replace(tensor, trainable="norm" in tensor.name) for tensor in last]]
    plan = make_estimate(of_job, OffloadConfig(master_remainders=True), links("H200", 55.0, None), 0.1, 0.2)
    (link,) = plan.links
    rates = (link.link.d2h, link.link.h2d, link.link.duplex)
    least_room = min(stage.activations for stage in plan.stages)
    assert floor_seconds(max(stage.away for stage in plan.stages), *rates, 0.2, 0.1, 0.0, least_room) > 0
    assert link.floor == 0.0 and link.hidden_from == link.link_seconds


@pytest.mark.parametrize(("gpus", "figures"), [(1, "55/55/51"), (2, "55/55/43"), (16, "20/20/12")])
def test_a_link_and_what_a_node_pins_are_of_as_many_gpus_as_copy_on_a_host(gpus, figures):
    of_job = job(f"{PRESETS['short']} --gbs 64", gpus)
    (of_node,) = make_estimate(of_job, links=links("H200")).links
    assert of_node.link.figures == figures
    (alone,) = make_estimate(of_job, links=links("H200", None, 1)).links
    assert alone.link.figures == "55/55/51"
    (given,) = make_estimate(of_job, links=links("H200", 30.0, None)).links
    assert given.link.figures == "30/30/30"
    if gpus == 16:
        plan = make_estimate(job(f"{PRESETS['short']} --gbs 64 --pp 4", gpus), links=links("GB200"))
        ranks = [of_rank.total for of_stage in plan.states for of_rank in of_stage]
        assert len(ranks) == gpus
        assert plan.links[0].pinned == max(sum(ranks[first : first + 4]) for first in range(0, gpus, 4))


def test_without_activations_no_floor_is_given_but_the_bare_one():
    of_job = job(f"{PRESETS['long']} --gbs 6", 1)
    (known,) = make_estimate(of_job, OffloadConfig(), links("H200"), 0.1, None).links
    of_job.config.model.mtp_num_layers = 1
    plan = make_estimate(of_job, OffloadConfig(), links("H200"), 0.1, None)
    (link,) = plan.links
    assert link.most_floor == known.most_floor
    assert (known.floor is None, link.floor, link.hidden_from) == (False, None, None)
    assert any("--activations-gb" in note for note in plan.notes)


def test_a_share_that_upstreams_offloader_chooses_is_not_counted_as_everything():
    of_job = replace(job(SMALL, 1), engine="mcore generation 2")
    of_job.config.optimizer.optimizer_state_offload_fraction = 0.5
    with pytest.raises(ValueError, match=r"optimizer_state_offload_fraction=0\.5"):
        make_estimate(of_job)
    of_job.config.optimizer.optimizer_state_offload_fraction = 1.0
    of_job.config.optimizer.provide = "provide"
    plan = make_estimate(of_job)
    assert plan.stages[0].away == RUNS["4 layers"][2]
    assert any(note.startswith("optimizer.provide:") for note in plan.notes), "an optimizer of the config's own"


def test_activations_of_a_model_that_is_more_than_a_gpt_are_not_counted():
    """A vision model's layers are none of the sizes that the config has for the language model's."""
    gpt = read_job("qwen3_30b_a3b_8gpu", None, {})
    vision = replace(gpt.tensors(0)[1], name="module.vision_model.decoder.layers.0.self_attention.linear_qkv.weight")
    offloads = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    model = SimpleNamespace(**vars(gpt.config.model) | offloads)
    config = SimpleNamespace(**vars(gpt.config) | {"model": model})
    more = make_estimate(replace(gpt, config=config, stages=[[[vision, *gpt.stages[0][0]]]]))
    assert make_estimate(gpt).knows_activations and not more.knows_activations
    told = "activations are not counted for this kind of model"
    assert f"{told}: peaks are lower bounds; give --activations-gb" in more.notes
    assert any("mcore offloads some, and pins bytes that are not known" in note for note in more.notes)
