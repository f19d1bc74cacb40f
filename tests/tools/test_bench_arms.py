"""What the bench starts for each arm, and what of several rounds goes where in its table."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from test_bench import GB, LINK, OFFLOADED, RESIDENT, arm, checkout

from bridge_fgo.tools.arms import gpu
from bridge_fgo.tools.arms.clocks import FIRST_COUNTED_STEP
from bridge_fgo.tools.bench import command, figures, presets
from bridge_fgo.tools.bench.options import Settings


def test_every_round_counts():
    slow = [*OFFLOADED[:6], 0.9, 0.9, 0.9]
    resident = [arm("resident", RESIDENT, 40 * GB) for _ in range(2)]
    mine = [arm("native", OFFLOADED, 30 * GB, 10 * GB), arm("native", slow, 32 * GB, 10 * GB, "b")]
    row = figures.make_row(resident, mine, LINK, True)
    assert row.bitwise_equal is False
    assert (row.peak_allocated_bytes, row.saved_allocated) == (32 * GB, pytest.approx(0.8))
    assert (row.step_seconds, row.step_seconds_max) == (pytest.approx(0.8), 0.9)


def test_the_floor_is_of_what_is_copied_over_the_slower_direction_into_the_room_of_activations(monkeypatch):
    asked = {}
    monkeypatch.setattr(figures, "floor_seconds", lambda **given: asked.update(given) or 0.0)
    resident, mine = arm("resident", RESIDENT, 40 * GB), arm("native", OFFLOADED, 30 * GB, 10 * GB)
    mine.result["copied_bytes"] = 7 * GB
    figures.least_added(resident.result, mine.result, LINK)
    assert asked == {
        "nbytes": 7 * GB,
        "link": 50 * GB,
        "duplex": 45 * GB,
        "backward": 0.1,
        "first_forward": 0.05,
        "between": pytest.approx(0.02),
        "room": 20 * GB,
    }


HEADINGS = {
    "added, s": "added_seconds",
    "E": "e",
    "E of copies": "e_of_copies",
    "floor E": "floor_e",
    "forward, s": "forward_seconds",
    "rest, s": "rest_seconds",
    "saved / S": "saved_allocated",
    "saved reserved / S": "saved_reserved",
    "pin, s": "pin_seconds",
    "steps 1-2 added, s": "first_two_steps_added_seconds",
}


def test_each_figure_of_the_table_is_beside_its_heading():
    resident, mine = [arm("resident", RESIDENT, 40 * GB)], [arm("native", OFFLOADED, 30 * GB, 10 * GB, "b")]
    values = {field: 10.0 + i for i, field in enumerate(HEADINGS.values())}
    row = replace(figures.make_row(resident, mine, LINK, True), **values)
    shown = dict(zip(*figures.table_of([row]), strict=True))
    assert {name: float(shown[name]) for name in HEADINGS} == {name: values[HEADINGS[name]] for name in HEADINGS}
    assert (shown["step, s"], shown["bitwise equal"], shown["save stall, s"]) == ("0.700 (0.600-0.700)", "NO", "-")
    shown = dict(zip(*figures.table_of([replace(row, save_stall_seconds=0.25)]), strict=True))
    assert shown["save stall, s"] == "0.25"


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Returns what starts an arm by its name, and returns its options by name and its environment."""

    def start(name, megatron_lm=(), **changes):
        seen = {}

        def run_arm(name, module, options, folder, launcher, environment, timeout):
            seen.update(options=options, environment=environment)
            if "--save" in options:
                seen["checkpoints"] = Path(options[options.index("--save") + 1])
                (seen["checkpoints"] / "iter_0000004").mkdir()  # into a folder that is there
            return arm(name, RESIDENT, 40 * GB)

        monkeypatch.setattr(command, "run_arm", run_arm)
        settings = Settings(
            arms=",".join(dict.fromkeys(["resident", name])),
            keep=tmp_path,
            megatron_lm=[Path(path) for path in megatron_lm],
            traces=False,
            **changes,
        )
        command.run_one(settings, settings.chosen()[-1], 0, arm("resident", RESIDENT, 40 * GB))
        if "checkpoints" in seen:
            assert seen["checkpoints"].parent == tmp_path and not seen["checkpoints"].exists()
        parsed = gpu.parse([*seen["options"], "--events", "unused"])
        assert parsed.async_save is parsed.finish_saves is ("checkpoints" in seen)
        options = seen["options"]
        values = {option: value for option, value in pairwise(options) if option.startswith("--")}
        return values, seen["environment"]

    return start


def test_a_step_follows_the_one_that_saves_last_whose_seconds_would_else_hold_the_writing(start):
    assert start("native", saves=True, alone_steps=0)[0]["--alone-steps"] == "1"
    assert start("native", saves=False, alone_steps=0)[0]["--alone-steps"] == "0"
    assert start("native", saves=True)[0]["--alone-steps"] == "3"


def test_an_arm_is_started_with_what_its_name_stands_for(start, tmp_path):
    options, environment = start("half")
    assert float(options["--gpu-memory-budget-gib"]) == 35 * GB / 2**30 and environment == {}
    assert "--gpu-memory-budget-gib" not in start("native")[0]
    assert start("whole")[0]["--no-master-remainders"]
    path = checkout(tmp_path / "dev")
    _, environment = start("mcore", megatron_lm=[path])
    assert environment["PYTHONPATH"].split(":")[0] == path
    assert "" not in environment["PYTHONPATH"].split(":"), "an empty entry is the current folder"
    options, environment = start("native:A=1:B=x:y=z")
    assert environment == {"A": "1", "B": "x", "y": "z"} and options["--engine"] == "native"


def test_a_value_of_a_variable_may_have_a_colon():
    variable = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert presets.read_name(f"native:{variable}") == ("native", dict([variable.split("=")]))


def test_an_arm_is_compared_with_the_resident_one_of_its_variables_where_there_is_one():
    names = ["resident", "native", "native:A=1", "resident:A=1", "native:A=2"]
    found = presets.arms(names, [], "short")
    compared = [presets.resident_of(one, found).name for one in found]
    assert compared == ["resident", "resident", "resident:A=1", "resident:A=1", "resident"]


def test_an_arm_that_is_named_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        presets.arms(["resident", "native", "native"], [], "short")


def test_where_nothing_resident_fits_as_it_is_resident_arms_recompute_and_offloaded_ones_do_not(start):
    recomputes = {name: start(name, preset="tight")[0] for name in ("resident", "recomputed", "auto", "native")}
    assert {name: found.get("--recompute") for name, found in recomputes.items()} == {
        "resident": "attention",
        "recomputed": "full",
        "auto": None,
        "native": None,
    }
    assert recomputes["auto"]["--gpu-memory-budget-gib"] == "auto" and recomputes["recomputed"]["--offload"] == "off"
    assert "--recompute" not in start("resident")[0]


@pytest.mark.parametrize("name", ["native", "whole", "half", "hybrid"])
@pytest.mark.parametrize("steps", [8, 9, 16])
def test_with_saves_an_arm_saves_twice_the_second_time_in_a_step_that_counts(start, name, steps):
    assert "--save" not in start(name)[0]
    options, _ = start(name, saves=True, steps=steps)
    saves = [step for step in range(1, steps + 1) if step % int(options["--save-interval"]) == 0]
    assert len(saves) == 2 and saves[1] >= FIRST_COUNTED_STEP


def test_mcores_offloaders_which_cannot_save_in_the_background_train_without_saves(start):
    assert "--save" not in start("mcore", saves=True)[0]


def test_every_gpu_gets_its_microbatches_and_the_experts_are_over_all(start):
    options, _ = start("native", gpus=8, preset="moe")
    assert (options["--gbs"], options["--ep"]) == (str(2 * 4 * 8), "8")


def test_every_arm_has_the_layers_asked_for_or_the_presets(start):
    assert [start(arm, layers=12)[0]["--layers"] for arm in ("resident", "native")] == ["12", "12"]
    assert start("resident")[0]["--layers"] == "24"


def test_tensor_parallel_gpus_share_their_microbatches():
    options = dict(pairwise(presets.size_options("short", gpus=4, tp=2, microbatches=8)))
    assert (options["--tp"], options["--gbs"]) == ("2", str(2 * 8 * 2))
    with pytest.raises(ValueError, match="--tp 3"):
        presets.size_options("short", gpus=4, tp=3)


@pytest.mark.parametrize(
    ("script", "why"),
    [("print('{\"d2h\": 1.0}', flush=True); exit(3)", "status 3"), ("pass", "status 0")],
    ids=["it failed", "it said nothing"],
)
def test_a_link_probe_that_fails_gives_no_figures(monkeypatch, script, why):
    monkeypatch.setattr(command, "launcher", lambda gpus: ("-c", script))  # before "-m" and the probe's module
    with pytest.raises(command.ArmFailed, match=why):
        command.probe(1)


@pytest.mark.parametrize("preset", presets.PRESETS)
@pytest.mark.usefixtures("cpu_standins")
def test_arms_are_comparable_bit_by_bit_and_only_experts_need_the_deterministic_mode_for_it(preset):
    from bridge_fgo.tools.arms.gpu_config import build_config

    options = gpu.parse([*presets.size_options(preset, gpus=2), "--events", "unused"])
    model = build_config(options).model
    assert not model.cross_entropy_loss_fusion
    assert model.deterministic_mode is (model.num_moe_experts is not None) is (preset == "moe")


@pytest.mark.usefixtures("cpu_standins")
def test_the_config_of_an_arm_with_saves_is_of_background_saves_into_its_folder(tmp_path):
    from bridge_fgo.tools.arms.gpu_config import build_config

    saves = presets.save_options(16, str(tmp_path))
    checkpoint = build_config(gpu.parse([*presets.size_options("short", 1), *saves, "--events", "unused"])).checkpoint
    assert (checkpoint.save, checkpoint.save_interval, checkpoint.async_save) == (str(tmp_path), 8, True)
    assert checkpoint.ckpt_format == "torch_dist"
