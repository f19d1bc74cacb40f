"""The bench without a GPU: arithmetic of its figures, reading of traces, and the whole command on made-up arms."""

import gzip
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from cli import cells, invoke

from bridge_fgo.tools.plan.systems import floor_seconds
from harness.arms.runner import ArmFailed, ArmRun
from harness.bench import command, figures, plots, presets

GB = 10**9
LINK = {"d2h": 50.0 * GB, "h2d": 55.0 * GB, "duplex": 45.0 * GB}
RESIDENT = [1.0, *[0.5] * 8]
OF_FSDP = ["resident", "native", "fsdp_resident", "fsdp", "hybrid"]
OFFLOADED = [1.5, 0.9, *[0.8] * 4, 0.7, 0.7, 0.6]


def arm(name, seconds, peak, released=0, digest="a"):
    """Return an arm that has ended, with these seconds of its steps; what it offloads it copies in 10 GB."""
    run = ArmRun(name)
    run.start = {"event": "start", "device": "GPU", "bridge": "0.6.2", "mcore": "0.19.2", "torch": "2"}
    run.steps = [
        {"step": i + 1, "loss": 1.0, "grad_norm": 2.0, "skipped": False, "seconds": s} for i, s in enumerate(seconds)
    ]
    run.result = {
        "digests": dict.fromkeys(("params", "masters", "moments"), digest),
        "engine": "native" if released else None,
        "state_bytes": 10 * GB,
        **dict.fromkeys(("released_bytes", "copied_bytes", "pinned_bytes"), released),
        "pin_seconds": 1.5 if released else 0.0,
        "enqueue_seconds": [0.01] * len(seconds) if released else [0.0] * len(seconds),
        "base_bytes": 20 * GB,
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": peak + GB,
        "phase_seconds": {"forward": 0.05, "first_forward": 0.05, "backward": 0.1, "rest": 0.12},
    }
    return run


def resident_arm():
    return arm("resident", RESIDENT, 40 * GB)


def native_arm(seconds=OFFLOADED, peak=30 * GB, digest="a"):
    return arm("native", seconds, peak, 10 * GB, digest)


def checkout(folder, parts=("core", "training")):
    """Make what a checkout of Megatron-LM is told by, and return its path."""
    for part in parts:
        (folder / "megatron" / part).mkdir(parents=True)
        (folder / "megatron" / part / "__init__.py").touch()
    return str(folder)


def write_trace(path, copies):
    step = {
        "step": [0.0, 0.6],
        "gpu": [["kernel", 0.0, 0.4, 0], *(["d2h", start, took, 2**22] for start, took in copies)],
        "host": [["cudaStreamSynchronize", 0.1, 0.002], ["cudaStreamSynchronize", 0.4, 0.1]],
        "memory": [[0.0, 20 * GB], [0.3, 30 * GB]],
    }
    with gzip.open(path, "wt") as file:
        json.dump(step, file)


# --- figures ---


def test_the_row_of_an_arm_counts_from_the_seventh_step_on():
    row = figures.make_row(resident_arm(), native_arm(), LINK, True)
    assert row.step_seconds == 0.7
    assert row.added_seconds == pytest.approx(0.2)
    assert (row.forward_seconds, row.rest_seconds) == (0.05, 0.12)
    assert row.e == pytest.approx(0.2 * 50 / 10)
    assert (row.saved_allocated, row.saved_reserved) == (1.0, 1.0)
    assert row.first_two_steps_added_seconds == pytest.approx(0.9)
    assert row.enqueue_share == pytest.approx(0.01 / 0.7)
    assert row.bitwise_equal is True


def test_the_floor_is_of_what_is_copied_into_activations_room_and_of_both_directions(monkeypatch):
    asked, mine = {}, native_arm()
    monkeypatch.setattr(figures, "floor_seconds", lambda **given: asked.update(given) or 0.0)
    mine.result["copied_bytes"] = 7 * GB
    figures.least_added(resident_arm().result, mine.result, LINK)
    rates = {"d2h": 50 * GB, "h2d": 55 * GB, "duplex": 45 * GB}
    phases = {"backward": 0.1, "first_forward": 0.05, "between": pytest.approx(0.02)}
    assert asked == {"nbytes": 7 * GB, **rates, **phases, "room": 20 * GB}

    for rates, passes, room, added in (
        # 10 GB; 5 GB come in backward's 0.1 s. The other 5 GB need 0.1 s both ways at once, and then 5 GB more have to
        # go: 2.5 GB in the 0.05 s of the first forward, the rest before it ends.
        ((50, 50, 50), (0.1, 0.05, 0.02), 20, 0.1 + 0.1 - 0.02 - 0.05),
        # In twice as fast, all 10 GB come in backward; then what did not go in the forward goes at 50 GB a second.
        ((50, 100, 50), (0.1, 0.05, 0.02), 20, 0.2 - 0.02 - 0.05),
        # Copies hide behind longer passes, where activations leave them room.
        ((50, 50, 45), (0.4, 0.3, 0.0), 20, 0.0),
        ((50, 50, 45), (0.4, 0.3, 0.0), 0, 10 / 45),
    ):
        assert floor_seconds(10 * GB, *(GB * rate for rate in rates), *passes, GB * room) == pytest.approx(added)


def test_a_trace_has_the_copies_of_the_offload_and_intervals_that_touch_are_one(tmp_path):
    write_trace(tmp_path / "t.gz", [(0.35, 0.2), (0.0, 0.2), (0.1, 0.2)])
    read = plots.read_trace(tmp_path / "t.gz")
    assert read.d2h == [(0.0, pytest.approx(0.3)), (0.35, pytest.approx(0.55))] and read.h2d == []
    assert plots.merge([(3, 4), (0, 1), (0.5, 2), (2.1, 2.2)], gap=0.2) == [(0, 2.2), (3, 4)]


def test_the_half_arm_asks_for_half_of_the_saving_and_every_choice_of_the_command_exists():
    assert command.budget_gib(resident_arm()) == 35 * GB / 2**30
    assert list(get_args(command.Preset)) == list(presets.PRESETS)
    assert presets.MICROBATCHES.keys() <= presets.PRESETS.keys()
    assert get_args(command.Sharding) == presets.STRATEGIES


# --- which steps count ---

COLD = [1.0] * 6


def run(name, seconds, released=0):
    """An arm with these seconds from the seventh step on."""
    made_up = arm(name, [*COLD, *seconds], 40 * GB, released)
    made_up.result["step_seconds"] = [*COLD, *seconds]
    return made_up


def test_the_table_has_ranges_and_dashes_and_the_json_has_what_was_measured():
    mine = run("native", [0.5, 0.6, 0.7, 0.8])
    other = run("resident", [0.7, 1.1])
    other.result["digests"] = mine.result["digests"] | {"params": "b"}
    row = figures.make_row(other, mine, LINK, True)
    assert row.added_seconds == pytest.approx(0.65 - 0.9), "the medians of the steps from the seventh on"
    for stall, told in ((None, "-"), (0.25, "0.25")):
        shown = dict(zip(*figures.table_of([replace(row, save_stall_seconds=stall)]), strict=True))
        found = [shown[name] for name in ("step, s", "bitwise equal", "save stall, s")]
        assert found == ["0.650 (0.500-0.800)", "NO", told]
    (kept,) = json.loads(json.dumps(asdict(row)))["rounds"]
    assert kept["step_seconds"] == [*COLD, 0.5, 0.6, 0.7, 0.8]


SAVING = [0.5, 2.5, 0.1, 0.6, 0.6, 0.6, 1.5, 0.1]
"""Steps 7 to 14: 8 and 13 with a save, and each followed by a step into which no copies ran on."""


def test_the_stall_of_a_save_is_what_its_step_takes_beyond_others_the_median_but_for_the_first_save():
    one = run("native", SAVING, released=10 * GB)
    one.result.update(save_steps=[8, 13], between_seconds=[0.1] * 14)
    row = figures.make_row(one, one, LINK, True)
    assert row.save_stall_seconds == pytest.approx(1.5 - 0.6)
    assert (row.step_seconds, row.step_seconds_max) == (0.6, 0.6)
    (kept,) = row.rounds
    assert (kept["save_steps"], kept["between_seconds"]) == ([8, 13], [0.1] * 14)
    one = run("native", [0.9, 3.5, 1.0])
    one.result["save_steps"] = [4, 7, 8, 9]
    assert figures.save_stall_seconds(one, 0.5) == 0.5
    one = run("native", SAVING)  # an older arm, which does not tell of saves
    for saves in ({}, {"save_steps": []}, {"save_steps": [8]}):
        one.result |= saves
        assert figures.make_row(one, one, LINK, True).save_stall_seconds is None


# --- the command ---


SECONDS = {"resident": RESIDENT, "hybrid": [2.0] * 9, "fsdp_resident": [0.4] * 9, "fsdp": [0.65] * 9}
"""Seconds of the steps of made-up arms; those of others are `OFFLOADED`."""


@pytest.fixture
def made_up(monkeypatch):
    """Arms that train nothing; returns the digest of each, to be changed, and the names that fail."""
    digests, failing = {"fsdp_resident": "of fsdp", "fsdp": "of fsdp", "hybrid": "of a CPU"}, set()

    def run_one(settings, one, resident):
        write_trace(settings.keep / f"{one.name}.trace.gz", [] if one.name == "resident" else [(0.1, 0.2)])
        if one.name in failing:
            raise ArmFailed(one.name, "made up", "the log")
        released = 0 if one.is_resident else 10 * GB
        seconds = SECONDS.get(one.name, OFFLOADED)
        return arm(one.name, seconds, 40 * GB - released, released, digests.get(one.name, "a"))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(command, "run_one", run_one)
    monkeypatch.setattr(command, "probe", lambda gpus: LINK)
    return digests, failing


def bench(folder, *options):
    return invoke("bench", "--gpus", 1, "--keep", folder, *options)


def ran(folder, options, status=0):
    """Run the bench without traces; return its `bench.json`."""
    result = bench(folder, "--no-traces", *options.split())
    assert result.exit_code == status, result.output
    return json.loads((folder / "bench.json").read_text())


def names_of(saved):
    return [row["arm"] for row in saved["arms"]]


def test_the_bench_prints_five_figures_an_arm_or_all_with_a_legend_or_json_and_leaves_pictures(made_up, tmp_path):
    arms = ("--arms", "resident,native,half", "--layers", "12", "--microbatches", "8")
    short = bench(tmp_path, *arms)
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "--layers 12 " in saved["size"] and "--gbs 8 " in saved["size"]
    assert saved["size"] in " ".join(short.output.split())
    rows = cells(short.output)
    assert ["resident", "0.500", "-", "-", "-", "-"] in rows
    assert ["native", "0.700", "+40.0%", "1.00", "10.00", "yes"] in rows
    assert "floor E" not in short.output and "--verbose" in short.output
    long = bench(tmp_path, *arms, "--no-traces", "--verbose").stdout
    for heading in figures.table_of([])[0]:
        assert f"\n{heading}: " in long
    assert names_of(json.loads(bench(tmp_path, *arms, "--json", "--no-traces").stdout)) == [
        "resident",
        "native",
        "half",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--arms resident,nativ", "nativ is no arm: did you mean native?"),
        ("--gpus 2", "--gpus 2: torch sees 1 CUDA devices here"),
        ("--fsdp optim --full-graphs", "--full-graphs with --fsdp optim"),
        *(
            (f"{option}", f"{option}: only arms in turn")
            for option in ("--time-limit 60", "--rounds 2", "--turn-steps 9")
        ),
        ("--half-budget-gib 20 --arms resident,native", "--half-budget-gib 20: of the half arm"),
        ("--in-turn --saves", "leave one out"),
        ("--in-turn --arms resident,half:A=1", "--half-budget-gib"),
        ("--in-turn --steps 9", "--rounds"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(made_up, monkeypatch, tmp_path, options, said):
    for name in ("probe", "run_one", "run_in_turn"):
        monkeypatch.setattr(command, name, lambda *_: pytest.fail("used the GPU"))
    if "torch sees" not in said:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("looked for a GPU"))
    result = bench(tmp_path / "kept", *options.split())
    assert result.exit_code == 2 and said in result.output
    assert not (tmp_path / "kept").exists()


def test_the_arms_by_default_are_those_that_can_run(tmp_path):
    for how, names in (
        ({}, "resident,native,half,hybrid"),
        ({"in_turn": True}, "resident,native,hybrid"),
        ({"optimizer": "muon"}, "resident,native,half"),
        ({"megatron_lm": [Path(checkout(tmp_path))]}, "resident,native,half,mcore,hybrid"),
        ({"fsdp": "optim"}, ",".join(OF_FSDP)),
    ):
        assert command.Settings(**how).names == names.split(",")


@pytest.mark.parametrize("failing", ["resident", "fsdp_resident", "native"])
def test_a_failing_arm_is_named_and_only_arms_that_are_not_compared_with_it_are_reported(made_up, tmp_path, failing):
    made_up[1].add(failing)
    if failing == "resident":
        assert bench(tmp_path, "--arms", "resident,native", "--no-traces").exit_code == 2
        assert not (tmp_path / "bench.json").exists()
        return
    saved = ran(tmp_path, "--fsdp optim", status=2)
    gone = {"fsdp_resident", "fsdp"} if failing == "fsdp_resident" else {failing}
    assert set(saved["failed"]) == gone
    assert names_of(saved) == [name for name in OF_FSDP if name not in gone]


def test_arms_have_the_resident_bits_of_their_kind_or_need_none_or_the_status_is_1(made_up, tmp_path):
    saved = ran(tmp_path, "--fsdp optim_grads_params")
    assert names_of(saved) == OF_FSDP
    rows = {row["arm"]: row for row in saved["arms"]}
    assert rows["fsdp"]["bitwise_equal"] and rows["fsdp"]["added_seconds"] == pytest.approx(0.25)
    # 10 GB cross the link in 0.2 s.
    assert [rows[name]["e"] for name in ("fsdp", "native", "hybrid")] == pytest.approx([1.25, 1.0, 7.5])
    made_up[0]["native"] = "b"
    ran(tmp_path, "--arms resident,hybrid")
    ran(tmp_path, "--arms resident,native", status=1)
