"""The bench's arms with Megatron-FSDP: what they are started with, and E beside that of the DistributedOptimizer."""

import json

import pytest
from test_bench import GB, RESIDENT, arm, bench, made_up  # noqa: F401 (a fixture)

from bridge_fgo.tools.arms import gpu
from bridge_fgo.tools.bench import command, presets

ARMS = ["resident", "native", "fsdp_resident", "fsdp", "hybrid"]


def options_of(preset="short", fsdp="optim_grads_params"):
    found = presets.arms(ARMS, [], preset, fsdp=fsdp)
    return {one.name: gpu.parse([*one.options, "--events", "unused"]) for one in found}


@pytest.mark.parametrize("strategy", presets.STRATEGIES)
def test_two_arms_have_megatron_fsdp_with_what_it_shards_and_the_others_have_not(strategy):
    found = options_of(fsdp=strategy)
    assert {name: one.fsdp for name, one in found.items() if one.fsdp} == {"fsdp_resident": strategy, "fsdp": strategy}
    assert (found["fsdp_resident"].offload, found["fsdp"].offload) == ("off", "on")
    assert found["fsdp"].engine == "native" and found["hybrid"].hybrid


@pytest.mark.usefixtures("cpu_standins")
def test_all_arms_train_the_same_model_on_the_same_data():
    from bridge_fgo.tools.arms.gpu_config import build_config

    sizes, configs = presets.size_options("short", 1), {}
    for one in presets.arms(ARMS, [], "short", fsdp="optim"):
        configs[one.name] = build_config(gpu.parse([*sizes, *one.options, "--events", "unused"]))
    uses = {name: config.ddp.use_megatron_fsdp for name, config in configs.items()}
    assert {name for name, of_arm in uses.items() if of_arm} == {"fsdp_resident", "fsdp"}
    assert configs["fsdp"].checkpoint.ckpt_format == "fsdp_dtensor"
    assert configs["fsdp"].ddp.data_parallel_sharding_strategy == "optim"
    kinds = {
        (config.model.num_layers, config.model.hidden_size, config.train.global_batch_size, config.dataset.seq_length)
        for config in configs.values()
    }
    assert len(kinds) == 1


def test_each_kind_is_compared_with_a_resident_arm_of_its_own():
    found = presets.arms([*ARMS, "fsdp:A=1"], [], "short", fsdp="optim")
    compared = {one.name: presets.resident_of(one, found).name for one in found}
    assert compared == {
        **dict.fromkeys(("resident", "native", "hybrid"), "resident"),
        **dict.fromkeys(("fsdp_resident", "fsdp", "fsdp:A=1"), "fsdp_resident"),
    }


def test_where_nothing_resident_fits_its_resident_arm_recomputes_too():
    found = options_of("tight")
    assert {name: one.recompute for name, one in found.items() if one.recompute != "none"} == {
        "resident": "attention",
        "fsdp_resident": "attention",
    }


@pytest.mark.parametrize(
    ("names", "how", "why"),
    [
        (["resident", "fsdp_resident", "fsdp"], {}, "say what it shards, --fsdp no_shard"),
        (["resident", "native"], {"fsdp": "optim"}, "name both"),
        (["resident", "fsdp"], {"fsdp": "optim"}, "name both"),
        (["resident", "fsdp_resident", "fsdp"], {"fsdp": "optim", "optimizer": "muon"}, "with --optimizer muon"),
        (["resident", "fsdp_resident", "fsdp"], {"fsdp": "zero"}, "say what it shards"),
    ],
)
def test_arms_that_do_not_go_together_are_refused_by_name(names, how, why):
    with pytest.raises(ValueError, match=why):
        presets.arms(names, [], "short", **how)


def test_graphs_with_megatron_fsdp_are_refused_before_anything_starts(made_up, tmp_path):  # noqa: F811
    result = bench(tmp_path / "kept", "--fsdp", "optim", "--full-graphs", "--no-traces")
    assert result.exit_code == 2 and "--full-graphs with --fsdp optim" in result.output
    assert not (tmp_path / "kept").exists()


@pytest.fixture
def trained(made_up, monkeypatch):  # noqa: F811
    """Arms of which those with Megatron-FSDP have other steps than those without; returns the names that fail."""
    seconds = {"resident": RESIDENT, "native": [0.7] * 9, "hybrid": [2.0] * 9}
    seconds |= {"fsdp_resident": [0.4] * 9, "fsdp": [0.65] * 9}

    def run_one(settings, one, number, resident):
        if one.name in made_up[1]:
            raise command.ArmFailed(one.name, "made up", "the log")
        released = 0 if one.is_resident else 10 * GB
        digest = "b" if one.name == "hybrid" else "of fsdp" if one.is_fsdp else "a"
        return arm(one.name, seconds[one.name], 40 * GB - released, released, digest)

    monkeypatch.setattr(command, "run_one", run_one)
    return made_up[1]


def test_one_command_says_e_of_both_and_of_hybrid_device_optimizer(trained, tmp_path):
    result = bench(tmp_path, "--fsdp", "optim_grads_params", "--no-traces")
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert [row["arm"] for row in saved["arms"]] == ARMS
    rows = {row["arm"]: row for row in saved["arms"]}
    assert rows["fsdp"]["bitwise_equal"] and rows["fsdp"]["added_seconds"] == pytest.approx(0.25)
    # 10 GB cross the link in 0.2 s.
    assert [rows[name]["e"] for name in ("fsdp", "native", "hybrid")] == pytest.approx([1.25, 1.0, 7.5])
    shown = {
        line.split("│")[1].strip(): line.split("│")[4].strip() for line in result.output.splitlines() if "│" in line
    }
    assert [shown[name] for name in ("fsdp", "native", "hybrid")] == ["1.25", "1.00", "7.50"]


@pytest.mark.parametrize("failing", ["fsdp_resident", "fsdp", "native"])
def test_without_one_of_the_arms_nothing_is_compared_and_the_others_are_reported(trained, tmp_path, failing):
    trained.add(failing)
    result = bench(tmp_path, "--fsdp", "optim", "--no-traces")
    assert result.exit_code == 2
    saved = json.loads((tmp_path / "bench.json").read_text())
    gone = {"fsdp_resident", "fsdp"} if failing == "fsdp_resident" else {failing}
    assert set(saved["failed"]) == gone
    assert [row["arm"] for row in saved["arms"]] == [name for name in ARMS if name not in gone]


def test_in_turn_each_kind_is_compared_with_its_resident_arm_within_each_round(trained, monkeypatch, tmp_path):
    def run_in_turn(settings, chosen, console):
        runs = {one.name: [command.run_one(settings, one, 0, None)] for one in chosen}
        for (run,) in runs.values():
            for number, event in enumerate(run.steps):
                event["turn"] = number // 3  # the first is the warm-up
        return runs, {}

    monkeypatch.setattr(command, "run_in_turn", run_in_turn)
    result = bench(tmp_path, "--fsdp", "optim", "--in-turn", "--rounds", "2", "--no-traces")
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "bench.json").read_text())
    rounds = {row["arm"]: row for row in saved["in_turn"]["arms"]}
    assert rounds["fsdp"]["compared_with"] == "fsdp_resident" and rounds["fsdp_resident"]["compared_with"] == "resident"
    assert rounds["fsdp"]["e"] == pytest.approx(1.25)
