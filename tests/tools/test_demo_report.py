"""The demo's report and JSON, and where it runs."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from finished_arms import arm, step
from rich.console import Console
from typer.testing import CliRunner

from bridge_fgo.tools import demo
from bridge_fgo.tools.arms import comparator, runner
from bridge_fgo.tools.main import app

Captured = pytest.CaptureFixture[str]


# --- the report of a run ------------------------------------------------------------


def gpu_arm(name: str, scale: int, steps: list[runner.Event]) -> runner.ArmRun:
    """Returns an arm whose figures are ``scale`` times as large as one would be."""
    figures = {
        "state_bytes": 2_000,
        "released_bytes": 3_000_000,
        "pinned_bytes": 4_000_000_000,
        "peak_allocated_bytes": 5_000_000_000,
        "peak_reserved_bytes": 6_000_000_000,
        "peak_forward_backward_bytes": 7,
    }
    finished = arm(name, steps)
    finished.result |= {figure: scale * value for figure, value in figures.items()}
    return finished


def cells(text: str) -> dict[str, list[str]]:
    """Returns the cells after the first of every row that was printed, by the first."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in text.splitlines() if line[:1] in "│┃"]
    return {row[0]: row[1:] for row in rows if row}


def report(resident: runner.ArmRun, offloaded: runner.ArmRun, cpu: bool) -> str:
    console = Console(file=io.StringIO(), width=120)
    demo.print_report(console, resident, offloaded, comparator.compare(resident, offloaded), cpu)
    return console.file.getvalue()


def test_the_report_has_the_figures_of_each_arm_in_its_column() -> None:
    slow_at_first = [step(number) | {"seconds": 9.0 if number <= 3 else 0.25} for number in range(1, 6)]
    text = report(gpu_arm("resident", 1, slow_at_first), gpu_arm("offloaded", 2, slow_at_first), cpu=False)
    assert cells(text) | {
        "optimizer state": ["2.00 kB", "4.00 kB"],
        "released during forward and backward": ["3.00 MB", "6.00 MB"],
        "pinned host memory": ["4.00 GB", "8.00 GB"],
        "peak allocated": ["5.00 GB", "10.00 GB"],
        "peak reserved": ["6.00 GB", "12.00 GB"],
        "median step": ["0.250 s", "0.250 s"],  # without the first three steps
    } == cells(text)
    assert "peak state" not in text and "not speed" not in text


def test_the_report_of_the_cpu_has_the_peak_of_the_state_and_no_times() -> None:
    printed = cells(report(gpu_arm("resident", 1, [step(1)]), gpu_arm("offloaded", 2, [step(1)]), cpu=True))
    assert printed["peak state in forward and backward"] == ["7 B", "14 B"]
    assert not {"peak allocated", "peak reserved", "median step"} & set(printed)


def test_a_step_that_differs_is_in_the_report_of_a_long_run_and_equal_ones_half_way_are_not() -> None:
    ours = [step(number, loss=1.5) for number in range(1, 101)]
    theirs = [*ours[:49], step(50, loss=2.5), *ours[50:]]
    text = report(arm("resident", ours), arm("offloaded", theirs), cpu=True)
    printed = cells(text)
    assert printed["50"] == ["1.5", "2.5", "NO"] and printed["30"] == printed["71"] == ["1.5", "1.5", "yes"]
    assert not {"31", "49", "51", "70"} & set(printed)
    assert "NOT bitwise equal: losses DIFFERENT, grad norms equal, params equal" in " ".join(text.split())


def test_json_has_what_each_arm_took_and_what_is_equal() -> None:
    arms = gpu_arm("resident", 1, [step(1)]), gpu_arm("offloaded", 2, [step(1)])
    printed = demo.json_report(*arms, comparator.compare(*arms))
    assert printed["peak_allocated_bytes"] == {"resident": 5_000_000_000, "offloaded": 10_000_000_000}
    assert printed["peak_reserved_bytes"] == {"resident": 6_000_000_000, "offloaded": 12_000_000_000}
    assert printed["peak_forward_backward_bytes"] == {"resident": 7, "offloaded": 14}
    assert (printed["released_bytes"], printed["pinned_bytes"]) == (6_000_000, 8_000_000_000)
    assert printed["equal"] == dict.fromkeys(("losses", "grad norms", "params", "masters", "moments"), True)


# --- where the demo runs ------------------------------------------------------------


def test_the_cpu_is_taken_where_asked_for_without_a_look_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: pytest.fail("looked for a GPU"))
    assert demo.choose_device("cpu") == ("cpu", None)


def test_without_a_gpu_the_cpu_is_taken_unless_cuda_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(demo, "run_arm", lambda *arguments: pytest.fail("ran an arm"))
    assert demo.choose_device("auto") == ("cpu", "torch sees no CUDA device")
    assert demo.run(demo.Settings(device="cuda")) == 2
    assert "bridge-fgo demo: --device cuda: torch sees no CUDA device here" in capfd.readouterr().err


@pytest.mark.parametrize("missing", [None, "transformer_engine/pytorch.py", "megatron/bridge.py"])
def test_auto_takes_a_gpu_only_with_all_that_its_arm_imports(
    missing: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("transformer_engine/__init__.py", "transformer_engine/pytorch.py", "megatron/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "megatron/bridge.py").touch()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if missing is None:
        assert demo.choose_device("auto") == ("cuda", None)
        return
    (tmp_path / missing).unlink()
    device, why = demo.choose_device("auto")
    assert device == "cpu" and why is not None
    assert why.startswith("Transformer Engine or megatron.bridge does not import: ModuleNotFoundError: No module named")
    # What the user asks for is tried: its arm says what is wrong.
    assert demo.choose_device("cuda") == ("cuda", None)


@pytest.fixture
def arms_run(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The module and options of every arm that the demo runs, none of which is a process."""
    called: list[Any] = []

    def run_arm(name: str, module: str, options: list[str], *_: Any, **__: Any) -> runner.ArmRun:
        called.append((module, options))
        return arm(name, [step(1)])

    monkeypatch.setattr(demo, "run_arm", run_arm)
    monkeypatch.setattr(demo, "missing_packages", lambda: [])
    return called


def test_on_a_gpu_both_arms_are_the_gpus_with_the_sizes_that_were_given(
    arms_run: list[Any], monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.setattr(demo, "choose_device", lambda requested: ("cuda", None))
    assert demo.run(demo.Settings(steps=5, gpu_options=("--layers", "2"))) == 0
    options = ["--steps", "5", "--layers", "2", "--offload"]
    assert arms_run == [("bridge_fgo.tools.arms.gpu", [*options, on]) for on in ("off", "on")]
    captured = capfd.readouterr()
    assert "median step" in captured.out and "on the CPU" not in captured.out + captured.err


def test_on_the_cpu_the_user_is_told_why_and_sizes_of_the_gpus_demo_are_refused(
    arms_run: list[Any], monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.setattr(demo, "choose_device", lambda requested: ("cpu", "the test says so"))
    assert demo.run(demo.Settings(steps=5)) == 0
    assert {module for module, _ in arms_run} == {"bridge_fgo.tools.arms.cpu"}
    assert "Running on the CPU: the test says so." in capfd.readouterr().err
    arms_run.clear()
    assert demo.run(demo.Settings(gpu_options=("--layers", "2"))) == 2
    assert "bridge-fgo demo: --layers 2: only the GPU's demo has these sizes" in capfd.readouterr().err
    assert not arms_run


def test_every_option_of_the_command_reaches_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[demo.Settings] = []
    monkeypatch.setattr(demo, "run", lambda settings: given.append(settings) or 1)
    sizes = "--layers 2 --hidden 64 --ffn 96 --heads 4 --seq 32 --mbs 1 --gbs 8"
    options = [*sizes.split(), "--precision-aware", "--moments-dtype", "bf16"]
    command = ["demo", "--steps", "7", "--json", "--device", "cuda", "--keep", str(tmp_path), *options]
    assert CliRunner().invoke(app, command).exit_code == 1
    assert given == [demo.Settings(7, True, "cuda", tmp_path, tuple(options))]
