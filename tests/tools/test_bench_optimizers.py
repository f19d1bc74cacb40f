"""What arms train with: Muon, and the offloaders of several checkouts of Megatron-LM beside each other."""

import importlib.util

import pytest
from test_bench import checkout

from bridge_fgo.tools.arms import gpu
from bridge_fgo.tools.bench import presets


def options_of(names, megatron_lm=(), optimizer="adam"):
    """Return the parsed options of each arm, by its name."""
    found = presets.arms(names, list(megatron_lm), "short", optimizer)
    return {arm.name: gpu.parse([*arm.options, "--events", "unused"]) for arm in found}


@pytest.mark.parametrize("optimizer", ["muon", "dist_muon"])
def test_every_arm_trains_with_the_same_optimizer(optimizer):
    found = options_of(["resident", "native", "whole", "half", "auto", "recomputed"], optimizer=optimizer)
    assert {(one.optimizer, one.distributed, one.layer_wise) for one in found.values()} == {(optimizer, False, False)}
    assert found["resident"].offload == "off" and found["native"].offload == "on"


def test_mcores_own_muon_is_layer_wise_and_driven_by_a_patched_bridge():
    mcore = options_of(["resident", "mcore"], optimizer="dist_muon")["mcore"]
    assert (mcore.optimizer, mcore.distributed, mcore.layer_wise) == ("muon", True, True)
    assert mcore.no_install and mcore.offload == "on"
    assert not presets.arms(["resident", "mcore"], [], "short", "muon")[1].bitwise


def test_hybrid_device_optimizer_is_refused_beside_muon():
    with pytest.raises(ValueError, match="HybridDeviceOptimizer is Adam"):
        presets.arms(["resident", "hybrid"], [], "short", "muon")


def test_a_checkout_whose_mcore_steps_in_chunks_does_so_in_its_arm_beside_those_that_do_not(tmp_path):
    paths = [checkout(tmp_path / name) for name in ("generation_1", "in_chunks", "generation_2")]
    config = tmp_path / "in_chunks/megatron/core/optimizer/optimizer_config.py"
    config.parent.mkdir()
    config.write_text("    offload_optimizer_states_chunk_numel: int = 0\n")
    found = options_of(["resident", "mcore"], paths)
    chunks = {name: one.chunk_numel for name, one in found.items()}
    assert chunks == {"resident": 0, "mcore": 0, "mcore1": presets.CHUNK_NUMEL, "mcore2": 0}
    assert all(one.engine == "mcore" for name, one in found.items() if name != "resident")


def test_what_asks_for_the_offload_is_what_the_arm_names(monkeypatch, cpu_standins):
    from megatron.bridge.training import config as bridge

    from bridge_fgo.tools.arms.gpu_config import LAYER_WISE_CHUNK_MIB, ask_for_offload

    def asked(*options):
        optimizer = bridge.OptimizerConfig()
        ask_for_offload(optimizer, gpu.parse([*options, "--offload", "on", "--events", "unused"]))
        fields = {"offload_optimizer_states", "chunked_optimizer_state_offload", "use_layer_wise_distributed_optimizer"}
        set_ones = {name for name in fields if getattr(optimizer, name, False)}
        numbers = ("offload_optimizer_states_chunk_numel", "optimizer_state_offload_chunk_size_mb")
        return set_ones, {name: getattr(optimizer, name) for name in numbers if getattr(optimizer, name, 0)}

    assert asked() == ({"offload_optimizer_states"}, {})
    chunks = {"offload_optimizer_states_chunk_numel": 8}
    assert asked("--chunk-numel", "8") == ({"offload_optimizer_states"}, chunks)
    layer_wise = ("--optimizer", "muon", "--layer-wise", "--no-install")
    with pytest.raises(ValueError, match="apply patches/"):
        asked(*layer_wise)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    flags = {"chunked_optimizer_state_offload", "use_layer_wise_distributed_optimizer"}
    assert asked(*layer_wise) == (flags, {"optimizer_state_offload_chunk_size_mb": LAYER_WISE_CHUNK_MIB})
