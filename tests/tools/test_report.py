"""`bridge-fgo report`: what it reads, what it finds equal, and what it prints."""

import math
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from cli import run as run_command
from torch.utils.tensorboard import SummaryWriter

from bridge_fgo.figures import Stats
from bridge_fgo.tools.report import GRAD_NORM, LOSS, OURS, PEAKS, SECONDS, Run, compare_runs, is_bitwise_equal, load

GB = 10**9
LOSSES = [3.0, 2.0, 1.5, 1.25, 1.0]
STATS = {"released_bytes": 20 * GB, "pinned_bytes": 20 * GB, "bytes_offloaded": 19 * GB, "bytes_reloaded": 18 * GB}
OF_PHASES = {"peak_forward_backward_bytes": 28 * GB, "peak_step_bytes": 27 * GB, "peak_reserved_bytes": 29 * GB}


def log(folder, scalars, **how):
    """Write a TensorBoard log: of each tag the values from step 1 on."""
    with SummaryWriter(str(folder), **how) as writer:
        for tag, values in scalars.items():
            for step, value in enumerate(values, start=1):
                writer.add_scalar(tag, value, step)
    return folder


def tensorboard(folder, losses, offloaded=False):
    """Write a log as Bridge's `training_log` and this package's `log_scalars` do."""
    steps = len(losses)
    ours = Stats("native", "0.19.2", **STATS, **OF_PHASES).scalars() if offloaded else {}
    with SummaryWriter(str(folder)) as writer:
        for step, loss in enumerate(losses, start=1):
            writer.add_scalar(f"{LOSS} vs samples", loss, 8 * step)
    return log(
        folder,
        {
            LOSS: losses,
            GRAD_NORM: [2.0] * steps,
            SECONDS: ([9.0] * 2 + [0.5 + 0.1 * offloaded] * steps)[:steps],
            "memory/mem-max-allocated-gigabytes": [28.5 if offloaded else 48.2] * steps,
            **{tag: [value] * steps for tag, value in ours.items()},
        },
        filename_suffix=".rest",
    )


def report(*arguments):
    """Run `bridge-fgo report`; return its status, and what it printed, in one line."""
    return run_command("report", *arguments)


# --- runs with logs ---


def test_equal_logs_have_a_sentence_each_also_if_only_this_packages_peaks_were_logged(tmp_path):
    resident = tensorboard(tmp_path / "resident", LOSSES)
    offloaded = tensorboard(tmp_path / "offloaded", LOSSES, offloaded=True)
    recomputed = tensorboard(tmp_path / "recomputed", LOSSES)
    status, printed = report(resident, offloaded, recomputed)
    assert status == 0 and printed.startswith(
        "offloaded against resident: 19.70 GB less GPU memory (41%, 48.20 GB to 28.50 GB); steps 20.0% slower "
        "(0.500 to 0.600 s); bitwise equal over 5 steps: lm loss, grad-norm. "
        "recomputed against resident: 0 B less GPU memory"
    )
    assert "steps 0.0% slower" in printed and "cross_entropy" not in printed
    runs = [
        log(tmp_path / name, {LOSS: [1.0] * 4} | {f"{OURS}{tag}": [nbytes * GB] * 4 for tag, nbytes in figures.items()})
        for name, figures in {
            "measured": {"peak_forward_backward_bytes": 48, "peak_step_bytes": 30, "released_bytes": 0},
            "moved": {"peak_forward_backward_bytes": 28, "planned_peak_bytes": 29, "released_bytes": 20},
        }.items()
    ]
    status, printed = report(*runs)
    assert status == 0
    assert "20.00 GB less GPU memory in forward and backward (42%, 48.00 GB to 28.00 GB)" in printed


def test_the_first_different_step_is_named_and_a_run_beside_is_shown_and_need_not_be_equal(tmp_path):
    first = tensorboard(tmp_path / "first", [3.0, 2.0, 1.5])
    second = tensorboard(tmp_path / "second", [3.0, 2.0 + 2**-21, 1.0])
    log(second, {GRAD_NORM: [2.0, 2.0, 7.0]}, filename_suffix=".second")
    status, printed = report(first, second)
    assert status == 1 and "NOT bitwise equal, first at step 2 in lm loss: 2 and 2.00000048." in printed
    assert "model.cross_entropy_loss_fusion=False" in printed, "two runs alike may differ so"
    resident, hybrid = (tensorboard(tmp_path / name, [loss]) for name, loss in (("resident", 2.0), ("hybrid", 2.5)))
    assert report(resident, hybrid)[0] == 1
    status, printed = report(resident, "--beside", hybrid)
    assert status == 0 and "not meant to be bitwise equal" in printed
    assert "hybrid against resident: 0 B less GPU memory" in printed


def test_runs_of_one_name_are_called_by_their_paths_and_one_alone_is_an_error(tmp_path):
    resident, offloaded = (tensorboard(tmp_path / name, [1.0]) for name in ("resident/tb", "offloaded/tb"))
    printed = report(resident, offloaded)[1]
    assert printed.startswith("offloaded/tb against resident/tb: ") and str(tmp_path) not in printed
    status, printed = report(resident)
    assert status == 2 and "a run is compared with another" in printed


def test_runs_on_a_cpu_tell_nothing_of_speed(tmp_path):
    runs = (
        log(tmp_path / name, {LOSS: LOSSES, SECONDS: [1.0] * 5, f"{OURS}released_bytes": [released] * 5})
        for name, released in (("resident", 0), ("offloaded", 20 * GB))
    )
    status, printed = report(*runs)
    assert status == 0 and "CPU: no speed" in printed and "slower (" not in printed
    offloaded = {f"{OURS}{name}": {1: 1.0} for name in STATS}
    assert Run(name="a", is_fp32=True, scalars=offloaded).on_cpu
    assert not Run(name="a", is_fp32=True, scalars={**offloaded, f"{OURS}peak_step_bytes": {1: 1.0}}).on_cpu
    assert not Run(name="a", is_fp32=True, scalars={LOSS: {1: 1.0}}).on_cpu, "that is not known"


def test_of_a_step_that_was_run_again_the_last_value_counts_and_steps_that_the_newest_lacks_are_out(tmp_path):
    tensorboard(tmp_path, [3.0, 2.0, 1.0])
    with SummaryWriter(str(tmp_path), filename_suffix=".then") as writer:
        writer.add_scalar(LOSS, 7.0, 3)
    oldest, _ = sorted(tmp_path.iterdir())[:2]
    oldest.rename(tmp_path / "events.out.tfevents-1")  # a log may have another name
    run = load(tmp_path)
    assert run.scalars[LOSS] == {1: 3.0, 2: 2.0, 3: 7.0}
    assert not any("samples" in tag for tag in run.scalars), "their steps are samples"

    # A new job in an old job's folder, which died at step 2: it is not equal over four.
    first, again = (log(tmp_path / name, {LOSS: [4.0, 3.0, 2.0, 1.0]}) for name in ("first", "again"))
    log(again, {LOSS: [4.0, 3.0]}, filename_suffix=".new")
    run = load(again)
    assert all(max(steps) == 2 for steps in run.scalars.values())
    status, printed = report(first, again)
    assert status == 0
    assert "again: steps 3 to 4 are of an earlier file" in printed
    assert "bitwise equal over 2 steps (they logged 4 and 2)" in printed


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
    loss, model = {"lm loss": torch.tensor(2.0)}, [mock.Mock()]
    for step in range(3):
        state.train_state = SimpleNamespace(step=step)
        log_scalars(Stats("native", "0.19.2", **STATS, **OF_PHASES).scalars(), state)
        state.train_state = SimpleNamespace(step=step + 1, consumed_train_samples=step + 1, skipped_train_samples=0)
        train_utils.training_log(loss, {}, 1e-4, None, 1.0, False, 0, 1.5, None, None, cfg, state, None, model)
    state.tensorboard_logger.close()
    run = load(tmp_path)
    assert run.scalars[LOSS] == dict.fromkeys((1, 2, 3), 2.0)
    assert run.scalars[GRAD_NORM] == dict.fromkeys((1, 2, 3), 1.5)
    assert run.scalars[SECONDS] == dict.fromkeys((1, 2, 3), 0.5)
    ours = {name: max(run.scalars[f"{OURS}{name}"].values()) for name in (*STATS, *OF_PHASES)}
    assert ours == pytest.approx({**STATS, **OF_PHASES})
    assert [run.peak(tags) for tags in PEAKS.values()] == pytest.approx([30 * GB, 29 * GB, 28 * GB])


# --- what is equal ---


@pytest.mark.parametrize(
    ("first", "second", "is_fp32", "equal"),
    [
        ([float("nan")], [float("nan")], False, True),
        ([0.0], [-0.0], False, False),
        ([1.0], [1.0 + 2**-40], False, False),
        ([1.0, 2.0], [1.0], False, True),
        ([1.0], [], False, False),
        ([0.1], [0.10000000149011612], True, True),  # an arm and a log, which has 32 bits
    ],
)
def test_it_is_the_bits_that_count(first, second, is_fp32, equal):
    runs = (
        Run(name="run", is_fp32=fp32, scalars={LOSS: dict(enumerate(losses))})
        for losses, fp32 in ((first, False), (second, is_fp32))
    )
    assert is_bitwise_equal(compare_runs(*runs)) is equal


# --- mistakes, and runs of W&B ---


def test_what_is_no_run_is_an_error_that_says_what_would_be(tmp_path):
    assert "no such file" in report(tmp_path / "nothing")[1]
    assert "no TensorBoard events" in report(tmp_path)[1]
    one, _ = (log(tmp_path / name, {LOSS: [1.0]}) for name in "ab")
    assert "holds 2 TensorBoard logs" in report(tmp_path)[1]
    status, printed = report(one, one)
    assert status == 2 and "given twice" in printed
    broken = one / "events.out.tfevents.9.broken"
    broken.write_text("no log")
    assert f"bridge-fgo report: {broken}: broken" in report(one)[1]


@pytest.fixture
def wandb(monkeypatch):
    """Stands in for the package: a server with the run "me/project/abc"."""
    rows = [
        {"_step": step, "_runtime": 0.3, "lm loss": loss, "lm loss vs samples": 1.0, f"{OURS}released_bytes": released}
        for step, loss, released in ((1, 1.0, 1000), (2, "NaN", 2000), (3, 0.1, None))
    ]
    rows[1] |= {"note": "text", "done": True}

    def run(address):
        if address != "me/project/abc":
            raise RuntimeError("no such run")
        return SimpleNamespace(scan_history=lambda: iter(module.rows))

    errors = SimpleNamespace(Error=RuntimeError)
    module = SimpleNamespace(rows=rows, errors=errors, Api=lambda: SimpleNamespace(run=run))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_run_of_wandb_has_its_numbers_to_the_last_bit_and_what_cannot_be_read_is_named(wandb, monkeypatch, tmp_path):
    run = load("wandb:me/project/abc")
    loss = run.scalars.pop("lm loss")
    assert run.scalars == {"bridge_fgo/released_bytes": {1: 1000.0, 2: 2000.0}}, "without W&B's own and over samples"
    assert (loss[1], loss[3]) == (1.0, 0.1) and math.isnan(loss[2])
    assert (run.name, run.is_fp32) == ("abc", False)
    with pytest.raises(ValueError, match="wandb:me/project/other: no such run"):
        load("wandb:me/project/other")
    wandb.rows = []
    with pytest.raises(ValueError, match="wandb:me/project/abc: has no number"):
        load("wandb:me/project/abc")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="needs the package wandb"):
        load("wandb:me/project/abc")
    (tmp_path / "run-abc.wandb").touch()
    for given in (tmp_path, tmp_path / "run-abc.wandb"):
        with pytest.raises(ValueError, match="`wandb sync` them, then name wandb:ENTITY/PROJECT/RUN"):
            load(given)
