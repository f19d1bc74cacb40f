"""`bridge-fgo report`: what it reads, what it finds equal, and the page."""

import json
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from test_bench import write_trace
from torch.utils.tensorboard import SummaryWriter
from typer.testing import CliRunner

from bridge_fgo.figures import Stats
from bridge_fgo.tools.arms.record import EventWriter
from bridge_fgo.tools.main import app
from bridge_fgo.tools.report.command import compare_runs, is_bitwise_equal
from bridge_fgo.tools.report.runs import GRAD_NORM, LOSS, OURS, SECONDS, Run, load

GB = 10**9
STATS = {"released_bytes": 20 * GB, "pinned_bytes": 20 * GB, "bytes_offloaded": 19 * GB, "bytes_reloaded": 18 * GB}
PEAKS = {"peak_forward_backward_bytes": 28 * GB, "peak_step_bytes": 27 * GB, "peak_reserved_bytes": 29 * GB}


def tensorboard(folder, losses, offloaded=False):
    """Write a log as Bridge's `training_log` and this package's `log_scalars` do."""
    with SummaryWriter(str(folder)) as writer:
        for step, loss in enumerate(losses, start=1):
            writer.add_scalar(LOSS, loss, step)
            writer.add_scalar(f"{LOSS} vs samples", loss, 8 * step)
            writer.add_scalar(GRAD_NORM, 2.0, step)
            writer.add_scalar(SECONDS, 9.0 if step < 3 else 0.5 + 0.1 * offloaded, step)
            writer.add_scalar("memory/mem-max-allocated-gigabytes", 28.5 if offloaded else 48.2, step)
            for tag, value in Stats("native", "0.19.2", **STATS, **PEAKS).scalars().items() if offloaded else ():
                writer.add_scalar(tag, value, step)
    return folder


def arm(folder, name, losses, digest="a", device=None, **result):
    """Write the events of an arm as the bench does."""
    writer = EventWriter(folder / f"{name}.events.jsonl")
    if device is not None:
        writer.start(device)
    for step, loss in enumerate(losses, start=1):
        writer.step(step=step, loss=loss, grad_norm=1.0, skipped=False, passes=1, seconds=0.1 * step)
    digests = dict.fromkeys(("params", "masters", "moments"), digest)
    figures = dict.fromkeys(("state_bytes", "released_bytes", "pinned_bytes"), 20 * GB) | PEAKS
    figures = {**figures, "peak_allocated_bytes": 30 * GB, "engine": "native", "step_seconds": []} | result
    writer.result(digests=digests, **figures)
    writer.close()


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def cells(page, label):
    """Return the cells of a row of the page's tables."""
    row = re.search(rf"<tr><td>{re.escape(label)}</td>(.*?)</tr>", page)
    assert row is not None, label
    return re.findall(r"<td>(.*?)</td>", row[1])


def test_two_equal_logs_are_one_page_that_needs_no_network(tmp_path):
    resident = tensorboard(tmp_path / "resident", [3.0, 2.0, 1.5, 1.25, 1.0])
    offloaded = tensorboard(tmp_path / "offloaded", [3.0, 2.0, 1.5, 1.25, 1.0], offloaded=True)
    done = report(resident, offloaded, "--output", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[0] == (
        "offloaded against resident: 19.70 GB less GPU memory (41%, 48.20 GB to 28.50 GB); steps 20.0% slower "
        "(0.500 to 0.600 s); bitwise equal over 5 steps: lm loss, grad-norm."
    )
    assert "cross_entropy" not in done.output
    page = (tmp_path / "page.html").read_text()
    assert not re.findall(r'(?:src|href)="', page) and page.index("steps 20.0% slower") < page.index("<table")
    assert cells(page, "saved against resident") == ["-", "19.70 GB"]
    assert cells(page, "steps slower") == ["-", "+20.0%"]
    assert cells(page, "bitwise equal") == ["-", "yes"]
    assert cells(page, "peak allocated") == ["48.20 GB", "28.50 GB"]
    assert cells(page, "peak in forward and backward") == ["-", "28.00 GB"]
    assert cells(page, "copied to the host in a step") == ["-", "19.00 GB"]
    assert cells(page, "step, median (min-max), from the fourth on")[1] == "0.600 s (0.600-0.600)"


def test_a_resident_run_that_is_measured_is_compared_by_its_peaks_alone(tmp_path):
    """Neither job has `logger.log_memory_to_tensorboard=True`."""
    peaks = {"resident": (48 * GB, 30 * GB), "offloaded": (28 * GB, 27 * GB)}
    for name, (forward_backward, step_peak) in peaks.items():
        with SummaryWriter(str(tmp_path / name)) as writer:
            for step in range(1, 5):
                writer.add_scalar(LOSS, 1.0, step)
                writer.add_scalar("bridge_fgo/peak_forward_backward_bytes", forward_backward, step)
                writer.add_scalar("bridge_fgo/peak_step_bytes", step_peak, step)
                writer.add_scalar("bridge_fgo/released_bytes", 20 * GB if name == "offloaded" else 0, step)
    done = report(tmp_path / "resident", tmp_path / "offloaded", "--output", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert "20.00 GB less GPU memory in forward and backward (42%, 48.00 GB to 28.00 GB)" in done.output


def test_the_first_different_step_is_named(tmp_path):
    first = tensorboard(tmp_path / "first", [3.0, 2.0, 1.5])
    second = tensorboard(tmp_path / "second", [3.0, 2.0 + 2**-21, 1.0])
    with SummaryWriter(str(second), filename_suffix=".later") as writer:
        writer.add_scalar(GRAD_NORM, 7.0, 3)
    done = report(first, second, "--output", tmp_path / "page.html")
    assert done.exit_code == 1
    assert "NOT bitwise equal, first at step 2 in lm loss." in done.output
    page = (tmp_path / "page.html").read_text()
    assert "step 2: 2 / 2.00000048" in page
    for text in (page, done.output.replace("\n", " ")):
        assert "model.cross_entropy_loss_fusion=False" in text, "two runs alike may differ so"


def test_a_third_run_is_a_column_and_a_sentence_of_its_own(tmp_path):
    losses = [3.0, 2.0, 1.5, 1.25, 1.0]
    resident = tensorboard(tmp_path / "resident", losses)
    offloaded = tensorboard(tmp_path / "offloaded", losses, offloaded=True)
    recomputed = tensorboard(tmp_path / "recomputed", losses)
    done = report(resident, offloaded, recomputed, "--output", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    second = next(line for line in done.output.splitlines() if line.startswith("recomputed against resident"))
    assert "0 B less GPU memory" in second and "steps 0.0% slower" in second
    page = (tmp_path / "page.html").read_text()
    assert cells(page, "saved against resident") == ["-", "19.70 GB", "0 B"]
    assert cells(page, "steps slower") == ["-", "+20.0%", "+0.0%"]


def test_a_run_beside_is_shown_and_need_not_be_equal(tmp_path):
    resident, hybrid = (tensorboard(tmp_path / name, [loss]) for name, loss in (("resident", 2.0), ("hybrid", 2.5)))
    assert report(resident, hybrid, "--output", tmp_path / "page.html").exit_code == 1
    done = report(resident, "--beside", hybrid, "--output", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert "not meant to be bitwise equal" in done.output
    assert cells((tmp_path / "page.html").read_text(), "saved against resident") == ["-", "0 B"]


def test_runs_on_a_cpu_tell_nothing_of_speed(tmp_path):
    for name, released in (("resident.0", 0), ("offloaded.0", 20 * GB)):
        peak = 20 * GB - released
        arm(tmp_path, name, [2.0] * 6, device="cpu", released_bytes=released, peak_forward_backward_bytes=peak)
    done = report(tmp_path, "--output", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert "20.00 GB less optimizer state in forward and backward (100%, 20.00 GB to 0 B)" in done.output
    assert "CPU: no speed" in done.output and "slower" not in done.output
    page = (tmp_path / "page.html").read_text()
    assert cells(page, "steps slower") == ["-", "CPU: no speed"]
    assert cells(page, "step, median (min-max), from the fourth on") == ["CPU: no speed"] * 2


def test_a_log_of_this_package_without_a_gpus_peaks_is_of_a_cpu(tmp_path):
    offloaded = {f"{OURS}{name}": {1: 1.0} for name in STATS}
    assert Run(name="a", is_fp32=True, scalars=offloaded).on_cpu
    assert not Run(name="a", is_fp32=True, scalars={**offloaded, f"{OURS}peak_step_bytes": {1: 1.0}}).on_cpu
    assert not Run(name="a", is_fp32=True, scalars={LOSS: {1: 1.0}}).on_cpu, "that is not known"


def test_runs_of_one_name_are_called_by_their_paths_from_the_folder_in_common(tmp_path):
    logs = [tensorboard(tmp_path / name, [1.0]) for name in ("resident/tb", "offloaded/tb")]
    done = report(*logs, "--output", tmp_path / "page.html")
    assert done.output.startswith("offloaded/tb against resident/tb: "), done.output
    assert str(tmp_path) not in (tmp_path / "page.html").read_text()
    for folder in ("old", "old/new"):
        (tmp_path / folder).mkdir()
        arm(tmp_path / folder, "resident", [1.0])
    done = report(tmp_path / "old", tmp_path / "old/new", "--output", tmp_path / "page.html")
    assert done.output.startswith("old/new: resident against old: resident: "), done.output


def test_one_run_is_a_page_too(tmp_path):
    done = report(tensorboard(tmp_path / "run", [1.0]), "--output", tmp_path / "page.html")
    assert done.exit_code == 0, done.output


def test_of_a_step_that_was_run_again_after_a_resume_the_last_value_counts(tmp_path):
    tensorboard(tmp_path, [3.0, 2.0, 1.0])
    with SummaryWriter(str(tmp_path), filename_suffix=".resumed") as writer:
        writer.add_scalar(LOSS, 7.0, 3)
    (run,) = load(tmp_path)
    assert run.scalars[LOSS] == {1: 3.0, 2: 2.0, 3: 7.0}
    assert not any("samples" in tag for tag in run.scalars), "their steps are samples"


def test_steps_of_an_earlier_file_that_the_newest_did_not_reach_are_left_out(tmp_path):
    # A new job in an old job's folder, which died at step 2: it is not equal over four.
    first = tensorboard(tmp_path / "first", [4.0, 3.0, 2.0, 1.0])
    again = tensorboard(tmp_path / "again", [4.0, 3.0, 2.0, 1.0])
    with SummaryWriter(str(again), filename_suffix=".new") as writer:
        for step, loss in enumerate([4.0, 3.0], start=1):
            writer.add_scalar(LOSS, loss, step)
    (run,) = load(again)
    assert all(max(steps) == 2 for steps in run.scalars.values())
    done = report(first, again, "--output", tmp_path / "page.html")
    assert done.exit_code == 0
    for text in (done.output, (tmp_path / "page.html").read_text()):
        assert "again: steps 3 to 4 are of an earlier file" in " ".join(text.split())
    assert "bitwise equal over 2 steps (they logged 4 and 2)" in " ".join(done.output.split())


@pytest.mark.parametrize("content", ["{}", "[]", "{"])
def test_what_is_no_table_of_the_bench_is_named(tmp_path, content):
    (tmp_path / "bench.json").write_text(content)
    done = report(tmp_path)
    assert done.exit_code == 2 and "bridge-fgo report: " in done.output


def test_a_page_that_cannot_be_written_has_a_status_of_its_own(tmp_path):
    done = report(tensorboard(tmp_path / "run", [1.0]), "--output", "/nonexistent/page.html")
    assert done.exit_code == 2 and "/nonexistent/page.html" in done.output


def test_a_bench_folder_is_its_arms_in_the_tables_order_with_the_pictures_of_a_step(tmp_path):
    for name in ("half", "native", "resident"):
        arm(tmp_path, f"{name}.0", [2.0, 1.0], released_bytes=0 if name == "resident" else 20 * GB)
        write_trace(tmp_path / f"{name}.0.trace.gz", [(0.0, 0.2)])
    bench_table(tmp_path, resident=None, native=True, half=True)
    assert [run.name for run in load(tmp_path / "bench.json")] == ["resident", "native", "half"]
    done = report(tmp_path, "--output", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text()
    assert cells(page, "released") == ["0 B", "20.00 GB", "20.00 GB"]
    assert set(re.findall(r'(?:src|href)="([^,"]*)', page)) == {"data:image/png;base64"}
    assert 'alt="gantt"' in page and 'alt="memory"' in page


def bench_table(folder, **arms):
    """Write a bench's `bench.json`: whether each arm was found bitwise equal."""
    rows = [
        {"arm": name, "bitwise_equal": equal, "step_seconds": 0.5, "step_seconds_min": 0.4, "step_seconds_max": 0.6}
        for name, equal in arms.items()
    ]
    table = {"arms": [{**row, "pinned_bytes": GB} for row in rows], "state_bytes": 20 * GB, "where": {"device": "H200"}}
    (folder / "bench.json").write_text(json.dumps(table))


@pytest.mark.parametrize(("equal", "status"), [(True, 0), (False, 1)])
def test_a_table_with_no_events_beside_it_is_enough(tmp_path, equal, status):
    bench_table(tmp_path, resident=None, native=equal)
    done = report(tmp_path / "bench.json", "--output", tmp_path / "page.html")
    assert done.exit_code == status, done.output
    assert ("bitwise equal: all that the bench compared" in done.output) is equal
    page = (tmp_path / "page.html").read_text()
    assert cells(page, "step, median (min-max), from the fourth on")[1] == "0.500 s (0.400-0.600)"
    assert cells(page, "where") == ["H200", "H200"]


def test_an_arm_that_the_bench_lets_differ_is_no_failure(tmp_path):
    arm(tmp_path, "resident.0", [2.0])
    arm(tmp_path, "hybrid.0", [2.5])
    bench_table(tmp_path, resident=None, hybrid=None)
    done = report(tmp_path, "--output", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert "not meant to be bitwise equal" in done.output


def test_a_final_state_that_differs_is_not_equal(tmp_path):
    arm(tmp_path, "resident", [1.0])
    arm(tmp_path, "offloaded", [1.0], digest="b")
    done = report(tmp_path, "--output", tmp_path / "page.html")
    assert done.exit_code == 1
    assert "NOT bitwise equal in final params, final masters, final moments" in done.output
    assert "cross_entropy" not in done.output, "arms are set so"


def run(losses, is_fp32=False):
    return Run(name="run", is_fp32=is_fp32, scalars={LOSS: dict(enumerate(losses))})


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ([float("nan")], [float("nan")], True),
        ([0.0], [-0.0], False),
        ([1.0], [1.0 + 2**-40], False),
        ([1.0, 2.0], [1.0], True),
        ([1.0], [], False),
    ],
)
def test_it_is_the_bits_that_count(first, second, equal):
    assert is_bitwise_equal(compare_runs(run(first), run(second))) is equal


def test_an_arm_and_a_log_are_compared_in_the_32_bits_that_a_log_has():
    assert is_bitwise_equal(compare_runs(run([0.1]), run([0.10000000149011612], is_fp32=True)))


def test_a_loss_that_json_has_no_word_for_is_read_back(tmp_path):
    arm(tmp_path, "run", [float("inf")])
    assert load(tmp_path)[0].scalars[LOSS] == {1: float("inf")}


def test_what_is_no_run_is_an_error_that_says_what_would_be(tmp_path):
    for path, why in ((tmp_path / "nothing", "no such file"), (tmp_path, "neither TensorBoard events")):
        done = report(path, "--output", tmp_path / "page.html")
        assert (done.exit_code, why in done.output) == (2, True), done.output
    tensorboard(tmp_path / "a", [1.0])
    tensorboard(tmp_path / "b", [1.0])
    assert "holds 2 TensorBoard logs" in report(tmp_path).output
    assert "given twice" in report(tmp_path / "a", tmp_path / "a").output


def test_what_bridge_and_this_package_log_is_read(monkeypatch, cpu_standins, tmp_path):
    """The log is written by Bridge's own `training_log` and by `log_scalars`."""
    from megatron.bridge.training import config as bridge
    from megatron.bridge.training.utils import train_utils

    from bridge_fgo.bridge.reporting import log_scalars

    logger = bridge.LoggerConfig(
        log_timers_to_tensorboard=True, log_memory_to_tensorboard=True, log_interval=1, tensorboard_log_interval=1
    )
    cfg = mock.MagicMock(
        logger=logger,
        train=bridge.TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=3),
        optimizer=bridge.OptimizerConfig(),
        model=SimpleNamespace(num_moe_experts=None, mtp_num_layers=None),
        profiling=None,
        data_parallel_size=1,
    )
    others = dict.fromkeys(("wandb_logger", "mlflow_logger", "comet_logger", "energy_monitor"))
    state = mock.MagicMock(cfg=cfg, tensorboard_logger=SummaryWriter(str(tmp_path)), **others)
    state.timers.return_value.elapsed.return_value = 0.5
    peaks = {"allocated_bytes.all.peak": 30 * GB, "reserved_bytes.all.peak": 31 * GB}
    monkeypatch.setattr("torch.cuda.memory_stats", lambda: peaks)
    monkeypatch.setattr(train_utils, "get_num_microbatches", lambda: 1)
    monkeypatch.setattr(train_utils, "reduce_max_memory_across_pp_group", lambda report, group: report)
    for step in range(3):
        state.train_state = SimpleNamespace(step=step)
        log_scalars(Stats("native", "0.19.2", **STATS, **PEAKS).scalars(), state)
        state.train_state = SimpleNamespace(step=step + 1, consumed_train_samples=step + 1, skipped_train_samples=0)
        train_utils.training_log(
            {"lm loss": torch.tensor(2.0)},
            {},
            1e-4,
            None,
            1.0,
            False,
            0,
            1.5,
            None,
            None,
            cfg,
            state,
            None,
            [mock.Mock()],
        )
    state.tensorboard_logger.close()
    (run,) = load(tmp_path)
    assert run.scalars[LOSS] == dict.fromkeys((1, 2, 3), 2.0)
    assert run.scalars[GRAD_NORM] == dict.fromkeys((1, 2, 3), 1.5)
    assert run.scalars[SECONDS] == dict.fromkeys((1, 2, 3), 0.5)
    assert run.totals == pytest.approx({**STATS, **PEAKS, "peak_allocated_bytes": 30 * GB})


@pytest.mark.parametrize("name", ["events.out.tfevents", "events.out.tfevents-1"])
def test_a_log_may_have_another_name(tmp_path, name):
    tensorboard(tmp_path, [2.0, 1.0])
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / name)
    assert load(tmp_path)[0].scalars[LOSS] == {1: 2.0, 2: 1.0}


def test_a_digest_that_neither_run_left_is_not_equal_and_validation_losses_are_not_compared():
    runs = [
        Run(
            name=name,
            is_fp32=False,
            scalars={LOSS: {1: 1.0}, "validation loss": {1: float(name)}},
            digests={"params": "a", "masters": "b"},
        )
        for name in ("1", "2")
    ]
    parity = compare_runs(*runs)
    assert not is_bitwise_equal(parity)
    assert [part.part for part in parity if not part.equal] == ["final moments"]
