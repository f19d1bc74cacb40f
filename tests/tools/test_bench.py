"""The bench without a GPU: arithmetic of its figures, and the whole command on made-up arms."""

import gzip
import json
from typing import get_args

import pytest
import torch
from cli import cells, invoke

from bridge_fgo.tools.job.parallel import STRATEGIES
from bridge_fgo.tools.plan.systems import floor_seconds
from harness.arms.runner import ArmFailed, ArmRun
from harness.bench import command, figures, presets

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
        "base_bytes": 20 * GB,
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": peak + GB,
        "phase_seconds": {"forward": 0.05, "first_forward": 0.05, "backward": 0.1, "rest": 0.12},
    }
    return run


def resident_arm():
    return arm("resident", RESIDENT, 40 * GB)


def checkout(folder):
    """Make what a checkout of Megatron-LM is told by, and return its path."""
    for part in ("core", "training"):
        (folder / "megatron" / part).mkdir(parents=True)
        (folder / "megatron" / part / "__init__.py").touch()
    return folder


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
    row = figures.make_row(resident_arm(), arm("native", OFFLOADED, 30 * GB, 10 * GB), LINK, True)
    assert (row.step_seconds, row.step_seconds_min, row.step_seconds_max) == (0.7, 0.6, 0.7)
    assert row.added_seconds == pytest.approx(0.2)
    assert row.e == pytest.approx(0.2 * 50 / 10)
    assert (row.saved_allocated, row.saved_reserved) == (1.0, 1.0)
    assert row.bitwise_equal is True


def test_the_floor_is_of_what_is_copied_into_activations_room_and_of_both_directions(monkeypatch):
    asked, mine = {}, arm("native", OFFLOADED, 30 * GB, 10 * GB)
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


def test_the_half_arm_asks_for_half_of_the_saving_and_every_choice_of_the_command_exists():
    assert command.budget_gib(resident_arm()) == 35 * GB / 2**30
    assert list(get_args(command.Preset)) == list(presets.PRESETS)
    assert get_args(command.Sharding) == STRATEGIES


SAVING = [0.5, 2.5, 0.1, 0.6, 0.6, 0.6, 1.5, 0.1]
"""Steps 7 to 14: 8 and 13 with a save, and each followed by a step into which no copies ran on."""


def test_the_stall_of_a_save_is_what_its_step_takes_beyond_others_the_median_but_for_the_first_save():
    def run(seconds, **saves):
        one = arm("native", [*[1.0] * 6, *seconds], 40 * GB, 10 * GB)
        one.result |= saves
        return one

    one = run(SAVING, save_steps=[8, 13])
    row = figures.make_row(one, one, LINK, True)
    assert row.save_stall_seconds == pytest.approx(1.5 - 0.6)
    assert (row.step_seconds, row.step_seconds_max) == (0.6, 0.6)
    assert figures.save_stall_seconds(run([0.9, 3.5, 1.0], save_steps=[4, 7, 8, 9]), 0.5) == 0.5
    for saves in ({}, {"save_steps": []}, {"save_steps": [8]}):
        one = run(SAVING, **saves)
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


def test_the_bench_prints_the_figures_of_its_json_and_draws_pictures(made_up, tmp_path):
    printed = bench(tmp_path, "--arms", "resident,native,half", "--layers", "12", "--microbatches", "8").output
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("memory", "gantt"))
    assert "--layers 12 " in saved["size"] and saved["size"].endswith("--gbs 8")
    assert names_of(saved) == ["resident", "native", "half"]
    rows = cells(printed)
    assert ["resident", "0.500", "-", "-", "-", "-", "-", "-"] in rows
    assert ["native", "0.700", "+40.0%", "1.00", f"{saved['arms'][1]['floor_e']:.2f}", "10.00", "-", "yes"] in rows


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--arms resident,nativ", "use resident first"),
        ("--arms resident,native,native", "once"),
        ("--arms resident,hybrid --optimizer muon", "HybridDeviceOptimizer is Adam"),
        ("--arms resident,fsdp_resident,fsdp", "goes with both"),
        ("--fsdp optim --optimizer muon", "and with Adam"),
        ("--megatron-lm nowhere", "no megatron/core in it"),
        ("--gpus 2", "--gpus 2: torch sees 1 CUDA devices here"),
        ("--rounds 2", "only arms in turn"),
        ("--in-turn --saves", "leave one out"),
        ("--in-turn --arms resident,half:A=1", "leave one out"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(made_up, monkeypatch, tmp_path, options, said):
    for name in ("probe", "run_one", "run_in_turn"):
        monkeypatch.setattr(command, name, lambda *_: pytest.fail("used the GPU"))
    result = bench(tmp_path / "kept", *options.split())
    assert result.exit_code == 2 and said in " ".join(result.output.split())


def test_arms_of_a_resident_one_that_failed_are_compared_with_no_other(made_up, tmp_path):
    made_up[1].add("fsdp_resident")
    saved = ran(tmp_path, "--fsdp optim", status=2)
    assert set(saved["failed"]) == {"fsdp_resident", "fsdp"}
    assert names_of(saved) == ["resident", "native", "hybrid"]


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
