"""The bench without a GPU: arithmetic of its figures, reading of traces, and the whole report on made-up arms."""

import gzip
import html
import json
from typing import get_args

import pytest
import torch
from typer.testing import CliRunner

from bridge_fgo.tools.arms.runner import ArmFailed, ArmRun
from bridge_fgo.tools.bench import command, figures, options, plots, presets
from bridge_fgo.tools.bench.floor import floor_seconds
from bridge_fgo.tools.main import app

GB = 10**9
LINK = {"d2h": 50.0 * GB, "h2d": 55.0 * GB, "duplex": 45.0 * GB}


def arm(name, seconds, peak, released=0, digest="a"):
    run = ArmRun(name)
    run.start = {"event": "start", "device": "GPU", "bridge": "0.6.2", "mcore": "0.19.2", "torch": "2"}
    run.steps = [
        {"step": i + 1, "loss": 1.0, "grad_norm": 2.0, "skipped": False, "seconds": s} for i, s in enumerate(seconds)
    ]
    run.result = {
        "digests": dict.fromkeys(("params", "masters", "moments"), digest),
        "engine": "native" if released else None,
        "state_bytes": 10 * GB,
        "released_bytes": released,
        "copied_bytes": released,
        "pinned_bytes": released,
        "pin_seconds": 1.5 if released else 0.0,
        "enqueue_seconds": [0.01] * len(seconds) if released else [0.0] * len(seconds),
        "enqueue_alone_seconds": [0.02, 0.007, 0.007] if released else [0.0] * 3,
        "base_bytes": 20 * GB,
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": peak + GB,
        "phase_seconds": {"forward": 0.05, "first_forward": 0.05, "backward": 0.1, "rest": 0.12},
        "phase_seconds_of_ranks": [
            {"forward": 0.05, "first_forward": 0.05, "backward": 0.1, "rest": 0.12},
            {"forward": 0.04, "first_forward": 0.05, "backward": 0.1, "rest": 0.18},
        ],
    }
    return run


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


RESIDENT = [1.0, *[0.5] * 8]
OFFLOADED = [1.5, 0.9, *[0.8] * 4, 0.7, 0.7, 0.6]


def test_the_row_of_an_arm_counts_from_the_seventh_step_on():
    resident, mine = [arm("resident", RESIDENT, 40 * GB)], [arm("native", OFFLOADED, 30 * GB, 10 * GB)]
    row = figures.make_row(resident, mine, LINK, True)
    assert row.step_seconds == 0.7
    assert row.added_seconds == pytest.approx(0.2)
    assert (row.forward_seconds, row.rest_seconds) == (0.05, 0.12)
    assert row.e == pytest.approx(0.2 * 50 / 10)
    assert (row.saved_allocated, row.saved_reserved) == (1.0, 1.0)
    assert row.first_two_steps_added_seconds == pytest.approx(0.9)
    assert row.enqueue_share == pytest.approx(0.007 / 0.7)
    assert row.enqueue_by_the_clock_share == pytest.approx(0.01 / 0.7)
    assert row.bitwise_equal is True


def test_e_of_copies_leaves_out_how_fast_the_host_launched_the_other_forwards():
    resident, mine = [arm("resident", RESIDENT, 40 * GB)], [arm("native", OFFLOADED, 30 * GB, 10 * GB)]
    # The first rank waits for the other, whose host launches slowly.
    waiting = {"forward": 0.05, "first_forward": 0.06, "backward": 0.1, "rest": 0.4}
    slow = {"forward": 0.09, "first_forward": 0.11, "backward": 0.1, "rest": 0.2}
    mine[0].result["phase_seconds_of_ranks"] = [waiting, slow]
    row = figures.make_row(resident, mine, LINK, True)
    assert row.e_of_copies == pytest.approx((0.02 + 0.2 - 0.12) * 50 / 10)
    assert figures.make_row(resident, resident, LINK, True).e_of_copies is None
    slow["rest"] = None  # of a pipeline
    assert figures.make_row(resident, mine, LINK, True).e_of_copies is None


def test_another_digest_is_not_equal():
    resident = [arm("resident", RESIDENT, 40 * GB)]
    row = figures.make_row(resident, [arm("native", OFFLOADED, 30 * GB, 10 * GB, "b")], LINK, True)
    assert row.bitwise_equal is False


def test_the_floor_is_what_two_directions_at_once_leave_over():
    # 10 GB; 5 GB come in backward's 0.1 s. The other 5 GB need 0.1 s both ways at once, and then 5 GB more have to go:
    # 2.5 GB in the 0.05 s of the first forward, the rest before it ends.
    added = floor_seconds(
        10 * GB, link=50 * GB, duplex=50 * GB, backward=0.1, first_forward=0.05, between=0.02, room=20 * GB
    )
    assert added == pytest.approx(0.1 + 0.1 - 0.02 - 0.05)


def test_the_floor_is_zero_where_forward_and_backward_are_longer_than_the_copies():
    assert floor_seconds(10 * GB, 50 * GB, 45 * GB, backward=0.4, first_forward=0.3, between=0.0, room=20 * GB) == 0.0


def test_no_more_can_hide_than_activations_leave_room_for():
    with_room = floor_seconds(10 * GB, 50 * GB, 45 * GB, 0.4, 0.3, 0.0, room=20 * GB)
    without = floor_seconds(10 * GB, 50 * GB, 45 * GB, 0.4, 0.3, 0.0, room=0)
    assert with_room == 0.0
    assert without == pytest.approx(10 / 45)


def test_a_trace_has_the_copies_of_the_offload_and_intervals_that_touch_are_one(tmp_path):
    write_trace(tmp_path / "t.gz", [(0.35, 0.2), (0.0, 0.2), (0.1, 0.2)])
    read = plots.read_trace(tmp_path / "t.gz")
    assert read.d2h == [(0.0, pytest.approx(0.3)), (0.35, pytest.approx(0.55))] and read.h2d == []
    assert plots.merge([(3, 4), (0, 1), (0.5, 2), (2.1, 2.2)], gap=0.2) == [(0, 2.2), (3, 4)]


def test_every_checkout_of_megatron_lm_is_an_arm_of_its_own(tmp_path):
    a, b = checkout(tmp_path / "a"), checkout(tmp_path / "b")
    found = presets.arms(["resident", "mcore"], [a, b], "short")
    assert [(one.name, one.python_path) for one in found] == [("resident", ""), ("mcore", a), ("mcore1", b)]


def test_a_checkout_with_a_part_of_megatron_is_refused_before_anything_starts(tmp_path):
    path = checkout(tmp_path, parts=("core",))
    with pytest.raises(ValueError, match=r"no megatron/training in it"):
        presets.arms(["resident", "mcore"], [path], "short")


@pytest.mark.parametrize("names", [["native"], ["resident", "nativ"], [""]])
def test_an_unknown_arm_or_a_missing_resident_one_is_refused(names):
    with pytest.raises(ValueError, match="resident first"):
        presets.arms(names, [], "short")


def test_a_misspelt_arm_is_refused_before_the_gpu_is_touched(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("looked for a GPU"))
    monkeypatch.setattr(command, "probe", lambda gpus: pytest.fail("used the GPU"))
    result = bench(tmp_path / "kept", "--arms", "resident,nativ")
    assert result.exit_code == 2 and "nativ is no arm: did you mean native?" in result.output
    assert not (tmp_path / "kept").exists()


def test_every_preset_can_be_asked_for():
    assert list(get_args(options.Preset)) == list(presets.PRESETS) == list(presets.MICROBATCHES)
    assert get_args(options.Optimizer) == presets.OPTIMIZERS and get_args(options.Sharding) == presets.STRATEGIES


def test_the_preset_of_many_slabs_sets_their_size_for_this_packages_engine_alone():
    names, fsdp = list(presets.NAMES), "optim"
    small = {one.name: "--slab-bytes" in one.options for one in presets.arms(names, [], "slabs", fsdp=fsdp)}
    ours = ("native", "whole", "half", "auto", "fsdp")
    assert small == {name: name in ours for name in presets.NAMES}
    assert not any("--slab-bytes" in one.options for one in presets.arms(names, [], "short", fsdp=fsdp))


def test_the_half_arm_asks_for_half_of_the_saving():
    assert command.budget_gib(arm("resident", RESIDENT, 40 * GB)) == 35 * GB / 2**30


@pytest.fixture
def made_up(monkeypatch):
    """Arms that train nothing; returns the digest of each, to be changed, and the names that fail."""
    digests, failing = {}, set()

    def run_one(settings, one, number, resident):
        write_trace(settings.keep / f"{one.name}.{number}.trace.gz", [] if one.name == "resident" else [(0.1, 0.2)])
        if one.name in failing:
            raise ArmFailed(one.name, "made up", "the log")
        if one.name == "resident":
            return arm(one.name, RESIDENT, 40 * GB)
        return arm(one.name, OFFLOADED, 30 * GB, 10 * GB, digests.get(one.name, "a"))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(command, "run_one", run_one)
    monkeypatch.setattr(command, "probe", lambda gpus: LINK)
    return digests, failing


def bench(folder, *options):
    return CliRunner().invoke(app, ["bench", "--gpus", "1", "--keep", str(folder), *options])


def test_a_resident_arm_that_fails_is_status_2_and_no_table(made_up, tmp_path):
    made_up[1].add("resident")
    result = bench(tmp_path, "--arms", "resident,native", "--no-traces")
    assert result.exit_code == 2 and not (tmp_path / "bench.json").exists()


def test_the_bench_prints_a_table_and_leaves_json_and_pictures(made_up, tmp_path):
    result = bench(tmp_path, "--arms", "resident,native,half")
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert [row["arm"] for row in saved["arms"]] == ["resident", "native", "half"]
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "bench.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "<td>native</td>" in page
    for heading in figures.table_of([])[0]:
        assert f"<p>{html.escape(heading)}: " in page, "each column is explained"


def test_what_was_trained_is_said_with_its_number_of_layers_and_microbatches(made_up, tmp_path):
    result = bench(tmp_path, "--arms", "resident,native", "--layers", "12", "--microbatches", "8")
    size = json.loads((tmp_path / "bench.json").read_text())["size"]
    assert "--layers 12 " in size and "--gbs 16" in size
    assert size in " ".join(result.stdout.split()) and html.escape(size) in (tmp_path / "bench.html").read_text()


def test_the_terminal_has_five_figures_an_arm_and_with_verbose_all_with_a_legend(made_up, tmp_path):
    short = bench(tmp_path, "--arms", "resident,native", "--no-traces").stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in short.splitlines()]
    assert ["resident", "0.500", "-", "-", "-", "-"] in rows
    assert ["native", "0.700", "+40.0%", "1.00", "10.00", "yes"] in rows
    assert "floor E" not in short and "--verbose" in short
    long = bench(tmp_path, "--arms", "resident,native", "--no-traces", "--verbose").stdout
    for heading in figures.table_of([])[0]:
        assert f"\n{heading}: " in long


@pytest.mark.parametrize("megatron_lm", [False, True])
def test_mcores_offloader_is_an_arm_by_default_where_a_checkout_is_given(made_up, tmp_path, megatron_lm):
    given = ["--megatron-lm", checkout(tmp_path)] if megatron_lm else []
    assert bench(tmp_path, "--no-traces", *given).exit_code == 0
    saved = json.loads((tmp_path / "bench.json").read_text())
    mcore = ["mcore"] if megatron_lm else []
    assert [row["arm"] for row in saved["arms"]] == ["resident", "native", "half", *mcore, "hybrid"]


def test_more_gpus_than_there_are_is_an_error_that_names_both(made_up, tmp_path):
    result = bench(tmp_path, "--gpus", "2")
    assert result.exit_code == 2 and "--gpus 2: torch sees 1 CUDA devices here" in result.output


def test_json_is_the_only_thing_on_standard_output(made_up, tmp_path):
    result = bench(tmp_path, "--arms", "resident,native", "--json", "--no-traces")
    assert json.loads(result.stdout)["arms"][1]["arm"] == "native"


def test_the_reference_of_the_hosts_speed_is_that_of_all_arms(made_up, monkeypatch, tmp_path):
    original, loops = command.run_one, {"resident": 1e-3, "native": 0.5e-3}

    def run_one(settings, one, number, resident):
        run = original(settings, one, number, resident)
        run.result["host_loop_seconds_of_ranks"] = [[loops[one.name]] * len(run.steps)]
        return run

    monkeypatch.setattr(command, "run_one", run_one)
    result = bench(tmp_path, "--arms", "resident,native", "--json", "--no-traces")
    counted = {row["arm"]: row["steps_counted"] for row in json.loads(result.stdout)["arms"]}
    assert counted == {"resident": "3 of 3, uneven host", "native": "3 of 3"}


def test_an_arm_that_is_not_bitwise_equal_is_status_1_unless_it_need_not_be(made_up, tmp_path):
    made_up[0]["hybrid"] = "b"
    assert bench(tmp_path, "--arms", "resident,hybrid", "--no-traces").exit_code == 0
    made_up[0]["native"] = "b"
    assert bench(tmp_path, "--arms", "resident,native", "--no-traces").exit_code == 1


def test_a_failing_peer_is_named_and_the_others_are_reported(made_up, tmp_path):
    made_up[1].add("mcore")
    result = bench(tmp_path, "--arms", "resident,mcore,native", "--no-traces")
    assert result.exit_code == 2
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert list(saved["failed"]) == ["mcore"]
    assert [row["arm"] for row in saved["arms"]] == ["resident", "native"]
