"""`pretrain()` with each optimizer and parallelism is bitwise resident's; memory falls.

The cases of `BITWISE` ran on as many H200 as they have ranks. Those of Megatron-FSDP ran on one and two H100, and some
of one rank on an H200; its hybrid sharding has run on CPUs alone. Activation offload ran with two of the three waits.
Context parallelism has an attention of the tests' own: Transformer Engine's did not run with the cuDNN there.

Muon needs emerging-optimizers. AdaptiveMuon is on the CPU lane alone: that of mcore 0.19.2 looks for an attribute that
emerging-optimizers 0.3.0 does not set, and a resident run ends with an AttributeError too.
"""

from pathlib import Path

import pytest
from gpu_lane import (
    ACTIVATIONS,
    EXPERTS,
    FEW_ACTIVATIONS,
    MANY_ACTIVATIONS,
    PACKED,
    PRECISION_AWARE,
    SMALL,
    arm,
    assert_bitwise_equal,
    both_arms,
    needs_gpus,
    side_by_side,
)

from harness.arms import runner

RAN_ON = "one, two, four H200; two H100 (Megatron-FSDP)"

WHOLE = ("--fsdp", "optim_grads_params")
PARTS_OF_A_TENSOR = ("--slab-bytes", "1048576")


def muon(kind: str, *spread: str) -> tuple[str, ...]:
    """Returns the options of a training with a Muon."""
    return (*MANY_ACTIVATIONS, *spread, "--no-distributed", "--optimizer", kind)


DEEP = (*SMALL, "--layers", "24")
"""Of 443M parameters, so that DDP has many buckets, none with a fourth of a rank's gradients."""
LAZY, OFF = ("--gradients", "lazy"), ("--gradients", "true")
FP8, FUSED = "--fp8-weights", "--fused-wgrad"
ONCE, OF_TWO = ("--gbs", "2"), ("--gbs", "4")
"""One microbatch on one replica, and on each of two; or two of a pipeline, which interleaves no fewer."""


BITWISE = {
    "fused_adam": (1, 50, SMALL),
    "precision_aware_bf16_moments": (1, 50, (*SMALL, *PRECISION_AWARE)),
    "parts_that_move_in_groups_packed": (1, 20, (*SMALL, *PACKED, *PARTS_OF_A_TENSOR)),
    "parts_that_move_in_groups_whole": (1, 20, (*SMALL, "--no-master-remainders", *PARTS_OF_A_TENSOR)),
    "data_with_overlap": (2, 20, (*SMALL, "--dp-overlap")),
    "data_without_overlap": (2, 30, (*SMALL, "--no-dp-overlap")),
    "tensor": (2, 30, (*SMALL, "--tp", "2")),
    "pipeline": (2, 30, (*SMALL, "--pp", "2")),
    "interleaved_pipeline": (2, 30, (*SMALL, "--pp", "2", "--vpp", "2")),
    "context": (2, 30, (*SMALL, "CONTEXT_PARALLEL=2")),
    "expert": (2, 30, (*SMALL, "--ep", "2", *EXPERTS)),
    "optimizer_instances": (2, 30, (*SMALL, "--instances", "2")),
    "tensor_and_pipeline": (4, 30, (*SMALL, "--tp", "2", "--pp", "2")),
    "data_and_optimizer_instances": (4, 30, (*SMALL, "--instances", "2")),
    "expert_and_interleaved_pipeline": (4, 30, (*SMALL, "--ep", "2", "--pp", "2", "--vpp", "2", *EXPERTS)),
    "context_and_tensor": (4, 30, (*SMALL, "CONTEXT_PARALLEL=2", "--tp", "2")),
    "gradients_lazy": (1, 30, (*SMALL, *ONCE, *LAZY)),
    "gradients_off": (1, 30, (*DEEP, *OFF)),
    "gradients_lazy-experts": (1, 30, (*SMALL, *EXPERTS, *ONCE, *LAZY)),
    "gradients_off-experts": (1, 30, (*SMALL, *EXPERTS, *OFF)),
    "gradients_lazy-data": (2, 30, (*SMALL, *OF_TWO, "--dp-overlap", *LAZY)),
    "gradients_off-data": (2, 30, (*DEEP, "--dp-overlap", *OFF)),
    "gradients_lazy-tensor": (2, 30, (*SMALL, *ONCE, "--tp", "2", *LAZY)),
    "gradients_off-tensor": (2, 30, (*DEEP, "--tp", "2", *OFF)),
    "gradients_lazy-interleaved_pipeline": (2, 30, (*SMALL, *OF_TWO, "--pp", "2", "--vpp", "2", *LAZY)),
    "gradients_off-interleaved_pipeline": (2, 30, (*DEEP, "--pp", "2", "--vpp", "2", *OFF)),
    "gradients_lazy-tensor_and_data": (4, 30, (*SMALL, *OF_TWO, "--tp", "2", *LAZY)),
    "gradients_off-tensor_and_data": (4, 30, (*DEEP, "--tp", "2", *OFF)),
    "gradients_off-expert_and_data": (4, 30, (*DEEP, *EXPERTS, "--ep", "2", "--gbs", "16", *OFF)),
    "gradients_off-fused_wgrad": (1, 30, (*DEEP, FUSED, *OFF)),
    "gradients_lazy-fp8_current": (1, 30, (*SMALL, *ONCE, FP8, "tensorwise", FUSED, *LAZY)),
    "gradients_off-fp8_current": (1, 30, (*DEEP, FP8, "tensorwise", FUSED, *OFF)),
    "gradients_off-fp8_blockwise": (1, 30, (*DEEP, FP8, "blockwise", *OFF)),
    "gradients_off-fp8_delayed": (1, 30, (*DEEP, FP8, "delayed", FUSED, *OFF)),
    "gradients_lazy-fp8_current-experts": (1, 30, (*SMALL, *EXPERTS, *ONCE, FP8, "tensorwise", FUSED, *LAZY)),
    "gradients_off-fp8_current-data": (2, 30, (*DEEP, "--dp-overlap", FP8, "tensorwise", FUSED, *OFF)),
    "muon-data": (2, 30, muon("muon")),
    "muon-tensor": (2, 30, muon("muon", "--tp", "2")),
    "dist_muon-data": (2, 30, muon("dist_muon")),
    "dist_muon-tensor": (2, 30, muon("dist_muon", "--tp", "2")),
    "fsdp-no_shard": (1, 30, (*SMALL, "--fsdp", "no_shard")),
    "fsdp-optim": (2, 30, (*SMALL, "--fsdp", "optim")),
    "fsdp-optim_grads": (2, 30, (*SMALL, "--fsdp", "optim_grads")),
    "fsdp-experts": (1, 30, (*SMALL, *WHOLE, *EXPERTS)),
    "fsdp-expert_parallel": (2, 30, (*SMALL, *WHOLE, *EXPERTS, "--ep", "2")),
    "fsdp-tensor": (2, 30, (*SMALL, *WHOLE, "--tp", "2")),
    "fsdp-bf16_moments": (1, 30, (*SMALL, *WHOLE, *PRECISION_AWARE)),
    "fsdp-hybrid_sharding": (4, 30, (*SMALL, *WHOLE, "--instances", "2")),
}
"""Ranks, steps, options."""


@pytest.mark.gpu
@pytest.mark.parametrize("case", BITWISE)
def test_training_is_bitwise_equal_to_resident(tmp_path: Path, case: str) -> None:
    ranks, steps, options = BITWISE[case]
    needs_gpus(ranks)
    _, offloaded = both_arms(tmp_path, *options, steps=steps, ranks=ranks)
    assert (offloaded.result["gradient_bytes"] > 0) is case.startswith("gradients")
    assert (offloaded.result["gradient_bytes_offloaded"] > 0) is case.startswith("gradients_off")


@pytest.mark.gpu
def test_cuda_graphs_of_layers_are_bitwise_equal_to_resident(tmp_path: Path) -> None:
    both_arms(tmp_path, *SMALL, "--te-graphs", steps=12)
    assert "Start CUDA Graphs capture" in (tmp_path / "offloaded.log").read_text()


LARGE_STATES = ("--layers", "32", "--hidden", "2048", "--ffn", "8192", "--heads", "16", "--seq", "2048", "--mbs", "2")
"""2.2 billion parameters with 26 GB of states, and as many bytes of activations: 60 GB, resident."""
FALLS = {
    "fused_adam": (1, 8, 0, MANY_ACTIVATIONS),
    "adam": (1, 30, 0.9, muon("adam")),
    "muon": (1, 30, 0.9, muon("muon")),
    "dist_muon": (1, 30, 0.9, muon("dist_muon")),
    "gradients_lazy": (1, 8, 0, (*MANY_ACTIVATIONS, "--gbs", "4", *LAZY)),
    "gradients_off": (1, 8, 0, (*MANY_ACTIVATIONS, "--layers", "24", *OFF)),
    "fsdp": (1, 30, 0.95, (*MANY_ACTIVATIONS, *WHOLE)),
    "fsdp_of_2": (2, 30, 0.95, (*MANY_ACTIVATIONS, *WHOLE)),
    # On an H100 and an H200 the allocator kept 0.9 to 1.1 GB that fitted nothing, with 1.5 GB of states as with 10.6.
    # With 36 layers and one sequence of 1024 tokens it kept 1.7 GB of 28 that left, on an H100: 0.939 of them fell.
    "fsdp_reserved": (1, 8, 0.95, (*LARGE_STATES, "--gbs", "4", *WHOLE)),
}
"""Ranks, steps, the least share of all states that is released, options."""
GRADIENTS_FALL = {"gradients_lazy": 0.9, "gradients_off": 0.5}
"""The least share of all gradients that is not there at the peak, where they are managed."""


@pytest.mark.gpu
@pytest.mark.parametrize("case", FALLS)
def test_memory_falls_by_the_bytes_offloaded(tmp_path: Path, case: str) -> None:
    ranks, steps, share, options = FALLS[case]
    needs_gpus(ranks)
    # Reserved memory falls too where the states are larger than the holes between activations.
    is_reserved = case == "fsdp_reserved"
    resident, offloaded = both_arms(tmp_path, *options, steps=steps, ranks=ranks, at_once=not is_reserved)
    peak = "peak_reserved_bytes" if is_reserved else "peak_allocated_bytes"
    released, states = offloaded.result["released_bytes"], offloaded.result["state_bytes"]
    fallen = resident.result[peak] - offloaded.result[peak]
    print(f"\n{case}, {peak}: from {resident.result[peak]} by {fallen}, released {released} of {states}")
    assert released >= share * states
    gradients = GRADIENTS_FALL.get(case, 0) * offloaded.result["gradient_bytes"]
    assert fallen >= 0.95 * released + gradients, (resident.result, offloaded.result)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), PRECISION_AWARE], ids=["fused_adam", "precision_aware_bf16_moments"])
def test_the_step_that_makes_the_states_needs_no_more_memory_than_others(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    _, offloaded = both_arms(tmp_path, *FEW_ACTIVATIONS, *options, steps=8)
    two_parts = offloaded.result["released_bytes"] // 8  # of 16
    assert offloaded.result["first_step_peak_bytes"] <= offloaded.result["peak_allocated_bytes"] + two_parts


NARROW = ("--vocab", "2048")
"""The step takes whole tensors, some at a time: an embedding that is a quarter of all states would be its peak."""
SLACK = 64 * 2**20
"""Bytes by which the allocator may round in one run and not in the other."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "size", [SMALL, MANY_ACTIVATIONS, (*SMALL, *EXPERTS[:2])], ids=["small", "many_activations", "experts"]
)
def test_passes_replayed_from_a_full_iteration_graph_are_bitwise_resident_in_no_more_memory(
    tmp_path: Path, size: tuple[str, ...]
) -> None:
    resident, offloaded = both_arms(tmp_path, *size, *NARROW, "--full-graphs", steps=30)
    kept = [arm.result["graph_pool_bytes"] for arm in (resident, offloaded)]
    assert 0 < kept[1] <= kept[0] + SLACK
    reserved = [arm.result["peak_reserved_bytes"] for arm in (resident, offloaded)]
    print(f"\ngraphs keep {kept}, reserved at most {reserved}, states {offloaded.result['state_bytes']}")
    assert reserved[1] <= reserved[0] - offloaded.result["state_bytes"] // 2


OF_EXPERTS = (
    "--grouped-experts",
    "--offload-activations",
    "core_attn,attn_proj,mlp_norm,qkv_linear,expert_fc1,moe_act",
)
BESIDE_ACTIVATIONS = {
    "dense": (1, (*SMALL, *ACTIVATIONS)),
    "experts": (1, (*SMALL, *EXPERTS, *OF_EXPERTS)),
    "fp8_current": (1, (*SMALL, FP8, "tensorwise", *ACTIVATIONS)),
    "pipeline": (2, (*SMALL, "--pp", "2", *ACTIVATIONS)),
    "interleaved_pipeline": (2, (*SMALL, "--pp", "2", "--vpp", "2", *ACTIVATIONS)),  # one layer a chunk
}
"""Ranks, options."""


@pytest.mark.gpu
@pytest.mark.parametrize("case", BESIDE_ACTIVATIONS)
def test_training_with_mcores_activation_offload_is_bitwise_equal_to_training_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    ranks, options = BESIDE_ACTIVATIONS[case]
    needs_gpus(ranks)
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    arms = {
        "resident": options[:-2],
        "activations": (*options, "--activation-waits"),
        "both": (*options, "--offload", "on"),
    }
    resident, activations, both = side_by_side(
        lambda name: arm(name, tmp_path, "--steps", "30", *arms[name], ranks=ranks), list(arms)
    )
    assert_bitwise_equal(resident, both, steps=30)
    assert runner.compare(resident, activations).bitwise_equal
    for name in ("activations", "both"):
        assert "Activation Offload Summary" in (tmp_path / f"{name}.log").read_text()


LAYERS = ("--cpu-offloading-layers", "2")
"""Of four: as the fourth's backward begins, neither of the two is on the GPU."""
BESIDE_LAYERS = {
    "dense": ("0", MANY_ACTIVATIONS),
    "experts": ("0", (*MANY_ACTIVATIONS, *EXPERTS, "--grouped-experts")),
    "fp8_current": ("0", (*MANY_ACTIVATIONS, FP8, "tensorwise")),
    "dense-v1": ("1", MANY_ACTIVATIONS),
}
"""Which of its two implementations Transformer Engine takes (`NVTE_CPU_OFFLOAD_V1`), options."""
OF_HIDDEN = (4 * 2048) * 1024 * 2
"""Bytes of a tensor of the hidden size: tokens, hidden size, bf16."""
LEAVE = {"0": 2 * 2048 * 16 // 1024, "1": 2 * 8}
"""How many of those leave at least, of two layers. By default the scores (of 16 heads) and more. The first kind
takes what Transformer Engine's products save: twice a norm's input and output (of which the model's input stays), the
attention's output, and the 4 times as large input of the last product."""


@pytest.mark.gpu
@pytest.mark.parametrize("case", BESIDE_LAYERS)
def test_training_with_cpu_offloading_is_bitwise_equal_to_training_without_and_peaks_fall_by_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    version, options = BESIDE_LAYERS[case]
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", version)
    arms = {"resident": options, "layers": (*options, *LAYERS), "both": (*options, *LAYERS, "--offload", "on")}
    resident, layers, both = side_by_side(lambda name: arm(name, tmp_path, "--steps", "30", *arms[name]), list(arms))
    peaks = [run.result["peak_allocated_bytes"] for run in (resident, layers, both)]
    released = both.result["released_bytes"]
    print(f"\n{case}: {peaks}, released {released} of {both.result['state_bytes']}")
    assert_bitwise_equal(resident, both, steps=30)
    assert runner.compare(resident, layers).bitwise_equal
    assert peaks[0] - peaks[1] >= LEAVE[version] * OF_HIDDEN
    assert peaks[1] - peaks[2] >= 0.95 * released > 0.9 * both.result["state_bytes"]
