"""What the bench starts for each arm: its options, its environment, its config, and with whom it is compared."""

import importlib.util
from itertools import pairwise

import pytest
from built_jobs import config, parsed
from test_bench import GB, OF_FSDP, checkout, resident_arm

from harness.arms.runner import FIRST_COUNTED_STEP
from harness.bench import command, presets


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Returns what starts an arm by its name, and returns its options by name and its environment."""

    def start(name, **changes):
        seen = {}

        def run_arm(name, module, options, folder, launcher, environment, timeout):
            seen.update(options=options, environment=environment)
            return resident_arm()

        monkeypatch.setattr(command, "run_arm", run_arm)
        names = ",".join(dict.fromkeys(["resident", name]))
        settings = command.Settings(arms=names, keep=tmp_path, **{"traces": False} | changes)
        command.run_one(settings, settings.chosen()[-1], resident_arm())
        parsed(*seen["options"])  # which refuses what the arm does not take
        values = {option: value for option, value in pairwise([*seen["options"], ""]) if option.startswith("--")}
        return values, seen["environment"]

    return start


def test_an_arm_is_compared_with_the_resident_one_of_its_kind_and_variables():
    names = ["native", "resident:A=1", "native:A=1", "native:A=2", *OF_FSDP[2:], "fsdp:A=1"]
    found = presets.arms(["resident", *names], None, "short", fsdp="optim")
    compared = {one.name: presets.resident_of(one, found).name for one in found}
    assert compared == {
        **dict.fromkeys(("resident", "native", "native:A=2", "hybrid"), "resident"),
        **dict.fromkeys(("native:A=1", "resident:A=1"), "resident:A=1"),
        **dict.fromkeys(("fsdp_resident", "fsdp", "fsdp:A=1"), "fsdp_resident"),
    }
    variable = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert presets.read_name(f"native:{variable}") == ("native", dict([variable.split("=")]))


# --- what each arm is started with ---

NATIVE = {"offload": "on", "engine": "native"}
ARMS = {
    "resident": {"offload": "off"},
    "recomputed": {"offload": "off", "recompute": "full"},
    "native": NATIVE | {"recompute": "none", "gradients": None},
    "packed": NATIVE | {"master_remainders": True},
    "half": NATIVE,
    "auto": NATIVE | {"gpu_memory_budget_gib": "auto"},
    "lazy": NATIVE | {"gradients": "lazy"},
    "gradients": NATIVE | {"gradients": True},
    "auto_gradients": NATIVE | {"gradients": True, "gpu_memory_budget_gib": "auto"},
    "loop": {"offload": "off", "own_loop": True, "engine": "native"},
    "mcore": {"offload": "on", "engine": "mcore"},
    "fsdp_resident": {"offload": "off", "fsdp": "optim"},
    "fsdp": NATIVE | {"fsdp": "optim"},
    "hybrid": {"offload": "off", "hybrid": True},
}
"""Options that set an arm apart. Without "fsdp" it does not use Megatron-FSDP; without "hybrid" it is not hybrid."""


def differing(preset="short", names=tuple(ARMS), **how):
    """Return what of the arms' parsed options is not as `ARMS` says, by name, and all of them."""
    given = {arm.name: vars(parsed(*arm.options)) for arm in presets.arms(list(names), None, preset, **how)}
    wanted = {name: {"fsdp": None, "hybrid": False} | ARMS[name] for name in names}
    different = {
        (name, option): given[name][option]
        for name, options in wanted.items()
        for option, value in options.items()
        if given[name][option] != value
    }
    return different, given


def test_an_arm_has_the_options_that_its_name_and_the_preset_stand_for():
    assert not differing(fsdp="optim")[0]
    # A resident model does not fit: resident arms recompute attention, and offloaded arms recompute nothing.
    different, given = differing("tight", fsdp="optim")
    assert not different
    of_attention = {name for name, options in given.items() if options["recompute"] == "attention"}
    assert of_attention == {"resident", "fsdp_resident"}
    adam = [name for name in ARMS if not name.startswith("fsdp") and name not in ("mcore", "hybrid")]
    different, given = differing(names=adam, optimizer="dist_muon")
    trained = {(one["optimizer"], one["distributed"], one["layer_wise"]) for one in given.values()}
    assert not different and trained == {("dist_muon", False, False)}


def test_an_arm_is_started_with_its_budget_its_checkout_its_variables_and_its_gpus(start, tmp_path):
    options, environment = start("half")
    assert float(options["--gpu-memory-budget-gib"]) == 35 * GB / 2**30 and environment == {}
    assert "--gpu-memory-budget-gib" not in start("native")[0]
    path = checkout(tmp_path / "dev")
    paths = start("mcore", megatron_lm=path)[1]["PYTHONPATH"].split(":")
    assert paths[0] == str(path) and "" not in paths, "an empty entry is the current folder"
    options, environment = start("native:A=1:B=x:y=z", gpus=8, preset="moe")
    assert environment == {"A": "1", "B": "x", "y": "z"} and options["--engine"] == "native"
    assert (options["--gbs"], options["--ep"]) == (str(2 * 4 * 8), "8"), "microbatches for each, experts over all"
    assert [start(arm, layers=12)[0]["--layers"] for arm in ("resident", "native")] == ["12", "12"]


@pytest.mark.parametrize("steps", [8, 9, 16])
def test_with_saves_an_arm_but_mcores_saves_twice_the_second_time_in_a_step_that_counts(start, steps):
    options, _ = start("native", saves=True, steps=steps)
    saves = [step for step in range(1, steps + 1) if step % int(options["--save-interval"]) == 0]
    assert len(saves) == 2 and saves[1] >= FIRST_COUNTED_STEP
    assert options["--extra-steps"] == "1", "after the last save"
    assert {"--async-save", "--finish-saves"} < options.keys()
    assert "--save" not in start("mcore", saves=True)[0]


def test_mcores_own_muon_is_layer_wise_and_an_arm_asks_for_the_offloader_that_it_names(monkeypatch, cpu_standins):
    from megatron.bridge.training import config as bridge

    from harness.arms.gpu import LAYER_WISE_CHUNK_MIB, ask_for_offload

    names = ("offload_optimizer_states", "chunked_optimizer_state_offload", "use_layer_wise_distributed_optimizer",
             "optimizer_state_offload_chunk_size_mb")  # fmt: skip

    def asked(options):
        optimizer = bridge.OptimizerConfig()
        ask_for_offload(optimizer, options)
        return {name: getattr(optimizer, name) for name in names if getattr(optimizer, name, False)}

    assert asked(parsed("--offload", "on")) == {"offload_optimizer_states": True}
    _, found = presets.arms(["resident", "mcore"], None, "short", "dist_muon")
    mcore = parsed(*found.options)
    assert (mcore.optimizer, mcore.distributed, mcore.layer_wise) == ("muon", True, True)
    assert mcore.no_install and mcore.offload == "on" and not found.bitwise
    with pytest.raises(ValueError, match="apply patches/"):
        asked(mcore)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert asked(mcore) == dict.fromkeys(names[1:3], True) | {names[3]: LAYER_WISE_CHUNK_MIB}


# --- configs ---


@pytest.mark.usefixtures("cpu_standins")
def test_arms_are_comparable_with_and_without_megatron_fsdp_and_save_in_the_background(tmp_path):
    for preset in presets.PRESETS:
        model = config(*presets.size_options(preset, gpus=2)).model
        assert not model.cross_entropy_loss_fusion
        assert model.deterministic_mode is (model.num_moe_experts is not None) is preset.startswith("moe")
    arms = presets.arms(OF_FSDP, None, "short", fsdp="optim")
    configs = {one.name: config(*presets.size_options("short", 1), *one.options) for one in arms}
    assert {name for name, made in configs.items() if made.ddp.use_megatron_fsdp} == {"fsdp_resident", "fsdp"}
    assert configs["fsdp"].ddp.data_parallel_sharding_strategy == "optim"
    models = {(one.model.num_layers, one.model.hidden_size, one.dataset.seq_length) for one in configs.values()}
    assert len(models) == len({one.train.global_batch_size for one in configs.values()}) == 1
    checkpoint = config(*presets.size_options("short", 1), *presets.save_options(16, str(tmp_path))).checkpoint
    assert (checkpoint.save, checkpoint.save_interval, checkpoint.async_save) == (str(tmp_path), 8, True)
