"""The demos: what counts as bitwise equal, what exit statuses say, reports, where they run, and what `--rl` asks."""

import io
import json
import math
import os
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace

import children
import pytest
from cli import cells, invoke
from rich.console import Console

from bridge_fgo.tools.report import bits
from harness import demo, rl_demo
from harness.arms import runner
from harness.arms.rl.arm import parse
from harness.arms.rl.options import RlOptions
from harness.rl_demo import State, states_of_run

NAN_BITS = 0x7FF8000000000000


def step(number, loss=1.0, grad_norm=0.5, skipped=False, seconds=0.1):
    """Return a step's event as an arm writes it."""
    exact = {"loss_hex": loss.hex(), "grad_norm_hex": grad_norm.hex()}
    made = {"event": "step", "step": number, "loss": loss, "grad_norm": grad_norm, "skipped": skipped}
    return {**made, **exact, "passes": 1, "seconds": seconds}


def arm(name, steps, **digests):
    """Return an arm that has ended, without a training."""
    all_digests = {"params": "p", "masters": "m", "moments": "o"} | digests
    result = {"event": "result", "digests": all_digests, "released_bytes": 10, "state_bytes": 10}
    return runner.ArmRun(name, {"device": "cpu", "bridge": "0.6.2"}, steps, result)


# --- the comparison ---

DIFFERENT = {
    "nothing": ([step(1), step(2)], [step(1), step(2)], {}, []),
    "the same NaN": ([step(1, loss=math.nan)], [step(1, loss=math.nan)], {}, []),
    "the sign of zero": ([step(1, loss=0.0)], [step(1, loss=-0.0)], {}, ["losses"]),
    "the last bit of a loss": ([step(1)], [step(1, loss=math.nextafter(1.0, 2.0))], {}, ["losses"]),
    "the last bit of a norm": ([step(1)], [step(1, grad_norm=math.nextafter(0.5, 1.0))], {}, ["grad norms"]),
    "a skipped step": ([step(1)], [step(1, skipped=True)], {}, ["losses"]),
    "a missing step": ([step(1), step(2)], [step(1)], {}, ["losses", "grad norms"]),
    "no steps at all": ([], [], {}, ["losses", "grad norms"]),
    **{name: ([step(1)], [step(1)], {name: "other"}, [name]) for name in ("params", "masters", "moments")},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_arms_are_equal_but_for_the_parts_whose_bits_differ(what):
    theirs, ours, digests, different = DIFFERENT[what]
    runs = arm("resident", theirs), arm("offloaded", ours, **digests)
    same = runner.compare(*runs)
    assert [part for part, equal in same.parts.items() if not equal] == different
    assert same.bitwise_equal is not bool(different)
    for run in runs:
        del run.result["digests"]["moments"]
    assert not runner.compare(*runs).bitwise_equal, "a digest that neither has is no equality"


def test_bits_tell_nans_apart_and_a_number_from_none():
    nan, other = (struct.unpack("<d", struct.pack("<Q", NAN_BITS | payload))[0] for payload in (1, 2))
    assert bits(nan) == bits(nan) != bits(other)
    assert bits(None) != bits(0.0)


# --- following an arm ---


def test_a_line_that_is_still_being_written_waits(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = runner.EventTail(path)
    assert list(tail.new_events()) == []
    path.write_bytes(b'{"event": "start"}\n{"event": "st')
    assert list(tail.new_events()) == [{"event": "start"}]
    with path.open("ab") as file:
        file.write(b'ep"}\n')
    assert list(tail.new_events()) == [{"event": "step"}]
    assert list(tail.new_events()) == []


def test_an_arm_finds_the_harness_and_the_package_behind_what_is_on_the_path():
    own = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    for given, path in (({}, []), ({"PYTHONPATH": ""}, []), ({"PYTHONPATH": "mine:too"}, ["mine", "too"])):
        assert runner.environment_of(given)["PYTHONPATH"].split(os.pathsep) == [*path, *own]


def run(*words):
    """Run the command; returns status, output and errors."""
    result = invoke("demo", *words)
    return result.exit_code, result.stdout, result.stderr


def fake(monkeypatch, folder, arms, log="", status=0):
    """Have the processes of two arms leave these events; the second prints and ends as is said."""
    events = [[{"event": "start", **arm.start}, *arm.steps, *([arm.result] if arm.result else [])] for arm in arms]
    (folder / "arms.json").write_text(json.dumps([[events[0], "", 0], [events[1], log, status]]))
    monkeypatch.setenv("FAKE_ARMS", str(folder / "arms.json"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)


@pytest.fixture
def run_fake(tmp_path, monkeypatch):
    """Run the demo with arms that train nothing, changed as is said of the offloaded one; returns what `run` does."""
    monkeypatch.setattr(demo, "MODULE", "fake_arm")

    def run_fake(*words, losses=(1 / 3, 2 / 3, 1.0), result=None, **ends):
        arms = [arm(name, [step(i + 1, loss=i / 3 + 1 / 3) for i in range(3)]) for name in ("resident", "offloaded")]
        arms[1].steps = [step(number, loss=loss) for number, loss in enumerate(losses, start=1)]
        arms[1].result = arms[1].result | {"engine": "native"} if result is None else result
        fake(monkeypatch, tmp_path, arms, **ends)
        return run("--device", "cpu", "--steps", 3, *words)

    return run_fake


def test_equal_arms_exit_with_0_and_print_one_json_object_or_a_table(run_fake):
    status, out, _ = run_fake("--json")
    printed = json.loads(out)
    assert status == 0 and printed["loss_resident"] == printed["loss_offloaded"] == [1 / 3, 2 / 3, 1.0]
    wanted = {"device": "cpu", "bridge": "0.6.2", "engine": "native", "steps": 3, "bitwise_equal": True}
    assert wanted.items() <= printed.items() and printed["released_bytes"] == 10
    status, out, _ = run_fake()
    assert status == 0 and "Bitwise equal" in out and "0.333333333" in out
    assert "correctness and bytes, not speed" in " ".join(out.split())


OTHER = {"losses": (1 / 3, 2 / 3, math.nextafter(1.0, 2.0))}


@pytest.mark.parametrize(
    ("trouble", "words", "status", "said"),
    [
        (OTHER, (), 1, "NOT bitwise equal"),
        (OTHER, ("--json",), 1, '"bitwise_equal": false'),
        ({"losses": [math.nan] * 3}, ("--json",), 1, '"loss_offloaded": [null, null, null]'),
        ({"result": arm("", []).result | {"released_bytes": 0}}, (), 1, "released no memory"),
        ({"result": {}}, (), 2, "no result"),
        ({}, ("--tp", 2, "--crowd"), 2, "--tp, --crowd: only of --rl"),
        ({}, ("--keep", "/dev/null/x"), 2, "/dev/null/x"),
    ],
)
def test_what_went_wrong_has_its_status_and_is_said(run_fake, trouble, words, status, said):
    found, *printed = run_fake(*words, **trouble)
    assert found == status and said in "".join(printed)


def test_an_arm_that_fails_shows_its_last_lines(run_fake):
    log = "\n".join([*(f"trained step {number}" for number in range(1, 41)), "out of luck"])
    status, out, errors = run_fake("--json", log=log, status=1)
    assert (status, out) == (2, "")
    assert "out of luck" in errors and "trained step 40" in errors
    assert "trained step 11\n" not in errors, "only the last 30 lines are shown"


def test_keep_leaves_logs_and_events_and_a_second_demo_starts_afresh(run_fake, tmp_path):
    for _ in range(2):
        assert run_fake("--keep", tmp_path / "kept")[0] == 0
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == ["offloaded.events.jsonl", "offloaded.log", "resident.events.jsonl", "resident.log"]
    assert len((tmp_path / "kept" / "resident.events.jsonl").read_text().splitlines()) == 5


# --- the report ---


FIGURES = {"state_bytes": 2_000, "released_bytes": 3_000_000, "pinned_bytes": 4_000_000_000,
           "peak_allocated_bytes": 5_000_000_000, "peak_reserved_bytes": 6_000_000_000,
           "peak_forward_backward_bytes": 7}  # fmt: skip


def gpu_arm(name, scale, steps):
    """Return an arm whose figures are `scale` times as large as one would be."""
    finished = arm(name, steps)
    finished.result |= {figure: scale * value for figure, value in FIGURES.items()}
    return finished


def report(resident, offloaded, cpu):
    """Return the report as text, and the cells after the first of each of its rows by the first."""
    console = Console(file=io.StringIO(), width=120)
    demo.print_report(console, resident, offloaded, runner.compare(resident, offloaded), cpu)
    text = console.file.getvalue()
    return text, {row[0]: row[1:] for row in cells(text)}


def test_report_and_json_have_each_arms_figures_and_on_the_cpu_its_peak_of_state_and_no_times():
    slow_at_first = [step(number, seconds=9.0 if number <= 3 else 0.25) for number in range(1, 6)]
    arms = gpu_arm("resident", 1, slow_at_first), gpu_arm("offloaded", 2, slow_at_first)
    on_gpu = {
        "optimizer state": ["2.00 kB", "4.00 kB"],
        "released during forward and backward": ["3.00 MB", "6.00 MB"],
        "pinned host memory": ["4.00 GB", "8.00 GB"],
        "peak allocated": ["5.00 GB", "10.00 GB"],
        "peak reserved": ["6.00 GB", "12.00 GB"],
        "median step": ["0.250 s", "0.250 s"],  # without the first three steps
    }
    text, found = report(*arms, cpu=False)
    assert on_gpu.items() <= found.items() and "peak state" not in text and "not speed" not in text
    _, found = report(*arms, cpu=True)
    assert found["peak state in forward and backward"] == ["7 B", "14 B"]
    assert not {"peak allocated", "peak reserved", "median step"} & set(found)
    printed = demo.json_report(*arms, runner.compare(*arms))
    for name in (name for name in FIGURES if name.startswith("peak_")):
        assert printed[name] == {"resident": FIGURES[name], "offloaded": 2 * FIGURES[name]}
    assert (printed["released_bytes"], printed["pinned_bytes"]) == (6_000_000, 8_000_000_000)
    assert printed["equal"] == dict.fromkeys(("losses", "grad norms", "params", "masters", "moments"), True)


def test_a_step_that_differs_is_in_the_report_of_a_long_run_and_equal_ones_half_way_are_not():
    ours = [step(number, loss=1.5) for number in range(1, 101)]
    theirs = [*ours[:49], step(50, loss=2.5), *ours[50:]]
    text, found = report(arm("resident", ours), arm("offloaded", theirs), cpu=True)
    assert found["50"] == ["1.5", "2.5", "NO"] and found["30"] == found["71"] == ["1.5", "1.5", "yes"]
    assert not {"31", "49", "51", "70"} & set(found)
    assert "NOT bitwise equal: losses DIFFERENT, grad norms equal, params equal" in " ".join(text.split())


# --- where it runs ---


@pytest.mark.parametrize("missing", ["megatron.bridge", "megatron.core"])
def test_what_is_not_installed_is_named_alone(monkeypatch, missing):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else object())
    status, _, errors = run()
    assert status == 2 and f"bridge-fgo demo: {missing.replace('.', '-')} is not installed" in errors


@pytest.mark.parametrize("missing", [None, "transformer_engine/pytorch.py", "megatron/bridge.py"])
def test_auto_takes_a_gpu_only_with_all_that_its_arm_imports(missing, monkeypatch, tmp_path):
    needed = ("transformer_engine/__init__.py", "transformer_engine/pytorch.py", "megatron/__init__.py",
              "megatron/bridge.py")  # fmt: skip
    for name in needed:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if name != missing:
            (tmp_path / name).touch()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    device, why = demo.choose_device("auto")
    if missing is None:
        assert (device, why) == ("cuda", None)
        return
    assert device == "cpu" and why is not None
    assert why.startswith("Transformer Engine or megatron.bridge does not import: ModuleNotFoundError: No module named")
    # What the user asks for is tried: its arm says what is wrong.
    assert demo.choose_device("cuda") == ("cuda", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert demo.choose_device("auto") == ("cpu", "torch sees no CUDA device")
    status, _, errors = run("--device", "cuda")
    assert status == 2 and "bridge-fgo demo: --device cuda: torch sees no CUDA device here" in errors
    assert demo.choose_device("cpu") == ("cpu", None)


def test_arms_are_the_gpus_with_the_layers_given_or_the_cpus_and_the_user_is_told_why(monkeypatch):
    called = []

    def run_arm(name, module, options, *_, **__):
        called.append((module, options))
        return arm(name, [step(1)])

    monkeypatch.setattr(demo, "run_arm", run_arm)
    monkeypatch.setattr(demo, "missing_packages", lambda: [])
    monkeypatch.setattr(
        demo, "choose_device", lambda requested: (requested, (requested == "cpu" and "as is said") or None)
    )
    status, *printed = run("--steps", 5, "--device", "cuda", "--layers", 2)
    options = ["--steps", "5", "--layers", "2", "--offload"]
    assert status == 0 and called == [("harness.arms.gpu", [*options, on]) for on in ("off", "on")]
    assert "median step" in "".join(printed) and "on the CPU" not in "".join(printed)
    status, *printed = run("--steps", 5, "--device", "cpu")
    assert status == 0 and [options[0] for _, options in called[2:]] == ["--cpu"] * 2
    assert "Running on the CPU: as is said." in "".join(printed)


@pytest.mark.slow
def test_demo_on_the_cpu_is_bitwise_equal(tmp_path):
    status, out, errors = run("--steps", 4, "--json", "--device", "cpu", "--keep", tmp_path)
    assert status == 0, errors
    printed = json.loads(out)
    assert printed["bitwise_equal"] is True
    assert printed["steps"] == 4 == len(printed["loss_resident"]) == len(printed["loss_offloaded"])
    assert 0 < printed["released_bytes"] <= printed["state_bytes"]


# --- GRPO, asleep between updates ---

FULL = {"params": 200, "grads": 400, "optimizer": 1200, "reference": 0}
NONE = dict.fromkeys(FULL, 0)
ALONE = NONE | {"params": 200}
MOVES = [("asleep", NONE, 1400, 1800), ("params wake", ALONE, 200, -200),
         ("reference wakes", ALONE | {"reference": 200}, 200, -200), ("reference sleeps", ALONE, 0, 200),
         ("awake", FULL, 1200, -1600)]  # fmt: skip


def iteration(number, reward):
    """Return the event of an iteration; the first sleep of all takes longer."""
    phases = [{"phase": "begins", "at": 0.0, "memory": FULL}]
    for at, (phase, memory, copied, freed) in enumerate(MOVES):
        bytes_of = {"copied": copied, "freed": freed, "returned": freed, "memory": memory}
        phases.append({"phase": phase, "at": at, "seconds": 9.0 if number == 1 else 0.25, **bytes_of})
    phases.append({"phase": "trained", "at": 9.0, "memory": FULL})
    return step(number, seconds=2.0) | {"reward": reward, "held": 1000 + number, "phases": phases}


@pytest.fixture
def run_rl(tmp_path, monkeypatch):
    """Run the demo with arms that train nothing, changed as is said of the sleeping one; returns what `run` does."""
    monkeypatch.setattr(rl_demo, "MODULE", "fake_arm")

    def run_rl(*words, device="cpu", more_reward=0.0, digests=None, **ends):
        arms = []
        for name, more in (("resident", 0.0), ("sleeping", more_reward)):
            arms.append(arm(name, [iteration(number, number / 100 + more) for number in range(1, 31)]))
            arms[-1].start = {"device": device}
            arms[-1].result |= {"pinned_bytes": 5, "bytes_by_kind": {"params": 200}}
        arms[1].result["digests"] |= digests or {}
        fake(monkeypatch, tmp_path, arms, **ends)
        return run("--rl", "--device", "cpu", "--steps", 30, *words)

    return run_rl


@pytest.mark.parametrize("device", ["cpu", "a GPU"])
def test_tables_and_json_have_rewards_what_each_move_took_and_what_is_equal(run_rl, device):
    status, out, _ = run_rl(device=device)
    printed = " ".join(out.split())
    assert status == 0 and "Bitwise equal, asleep between updates or not" in printed
    if device == "cpu":
        assert "sleep: offload everything │ 0.2500 │ 1.40 kB │ 1.80 kB │ - │" in printed
        assert "no second process" in printed and "correctness and bytes, not speed" in printed
        return
    assert "│ 1.40 kB │ 1.80 kB │ 1.80 kB │" in printed and "not speed" not in printed
    assert "took and filled 1.00 kB in each sleep" in printed
    status, out, _ = run_rl("--json")
    found = json.loads(out)
    assert status == 0 and found["bitwise_equal"] is True and found["steps"] == 30
    assert found["reward"] == pytest.approx({"first": 0.055, "last": 0.255})
    assert found["moves"]["asleep"] == {"seconds": 0.25, "copied": 1400, "freed": 1800, "returned": 1800}
    assert found["held_bytes"] == 1002, "the least that the second process got, but in the first sleep"
    assert found["equal"] == dict.fromkeys(("rewards", "losses", "grad norms", "params", "masters", "moments"), True)


@pytest.mark.parametrize(
    ("trouble", "words", "status", "said"),
    [
        ({"digests": {"params": "other"}}, "", 1, ["NOT bitwise equal"]),
        ({"more_reward": 1e-9}, "", 1, ["NOT bitwise equal"]),
        ({"log": "out of luck", "status": 1}, "", 2, ["the sleeping arm failed", "out of luck"]),
        ({}, "--ranks 3 --tp 2", 2, ["--ranks 3: use a multiple of --tp x --pp = 2"]),
    ],
)
def test_what_went_wrong_with_rl_has_its_status_and_is_said(run_rl, trouble, words, status, said):
    found, *printed = run_rl(*words.split(), **trouble)
    assert found == status and all(text in "".join(printed) for text in said)


def test_what_the_user_gives_reaches_the_arm_and_several_ranks_are_launched_by_torchrun(monkeypatch):
    launched = []

    def run_arm(name, module, options, folder, on_event, launcher):
        assert module == rl_demo.MODULE
        launched.append((name, parse([*options, "--events", "x.jsonl"])[0], launcher[-1:]))
        raise runner.ArmFailed(name, "it is a test", "")

    monkeypatch.setattr(demo, "run_arm", run_arm)
    monkeypatch.setattr(demo, "choose_device", lambda requested: (requested, None))
    words = "--steps 7 --json --device cuda --ranks 4 --tp 2 --pp 2 --layers 8 --crowd"
    assert run("--rl", *words.split())[0] == 2
    given = {"steps": 7, "tp": 2, "pp": 2, "crowd": True, "layers": 8, "device": "cuda"}
    options = RlOptions(**rl_demo.DEFAULTS["cuda"] | given, sleep=False)
    assert launched == [("resident", options, ("4",))]


def test_the_picture_of_a_demo_has_the_phases_of_an_iteration(run_rl, tmp_path):
    kept, picture = (tmp_path / name for name in ("kept", "iteration.png"))
    assert run_rl("--keep", kept, "--picture", picture, device="a GPU")[0] == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    arm = runner.ArmRun("sleeping")
    for event in runner.EventTail(kept / "sleeping.events.jsonl").new_events():
        arm.add(event)
    states = states_of_run(arm)
    assert [sum(state.bytes.values()) for state in states] == [1800, 0, 200, 400, 1800]
    assert states[2] == State("weights alone:\nrollouts", ALONE, 0.25, 200)


@pytest.mark.slow
def test_the_reward_rises_and_the_run_that_sleeps_ends_bitwise_the_same(monkeypatch, tmp_path):
    names = {name: getattr(subprocess, name) for name in ("STDOUT", "DEVNULL")}
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=children.Program, **names))
    monkeypatch.setitem(rl_demo.DEFAULTS, "cpu", {"length": 2, "lr": 2e-3})
    status, out, errors = run("--rl", "--steps", 60, "--json", "--device", "cpu", "--keep", tmp_path)
    assert status == 0, errors
    printed = json.loads(out)
    assert printed["bitwise_equal"] is True and printed["steps"] == 60
    assert printed["reward"]["first"] < 0.2 and printed["reward"]["last"] > 2 * printed["reward"]["first"]
