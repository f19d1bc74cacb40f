"""A training that fails and is begun again: by the rerun state machine from a checkpoint, or in the same process."""

from __future__ import annotations

import gc
import json
import weakref

import children
import pytest
import restart_child
from bridge_loop import train
from saving import load
from test_checkpoints import SMALL_SLABS, assert_same_shards, session_of, training
from test_loop import configured

import bridge_fgo
from bridge_fgo.tools.arms import cpu_training
from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining

RESUME_TO_DISAMBIGUATE, FAILED_ON_RESULT_VALIDATION = 16, 17
"""Exit codes of mcore's rerun state machine."""


pytestmark = pytest.mark.usefixtures("fused_adam_in_mcore")


def faulty_machine(run, mode, fault):
    """Give the run another rerun state machine, made by Bridge, whose own injector makes a fault in every step."""
    from megatron.bridge.training.initialize import init_rerun_state
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine, get_rerun_state_machine

    names = {"rerun_mode": mode, "error_injection_type": fault, "error_injection_rate": 1}
    configured(run, **{f"rerun_state_machine__{name}": value for name, value in names.items()})
    destroy_rerun_state_machine()
    init_rerun_state(run.cfg.rerun_state_machine)
    return get_rerun_state_machine()


def test_every_step_twice_to_compare_it_is_bitwise_equal():
    digests, numbers = {}, {}
    for offload in (None, False, True):  # None: resident, each step once
        with training(bool(offload)) as run:
            if offload is not None:
                faulty_machine(run, "report_determinism_stats", "transient_error")
            records = [run.step() for _ in range(4)]
            assert {record.passes for record in records} == {1 if offload is None else 2}
            assert not offload or max(run.live_bytes) == 0
            numbers[offload] = [(record.loss, record.grad_norm) for record in records]
            digests[offload] = run.digests()
    assert numbers[True] == numbers[False] == numbers[None]
    assert digests[True] == digests[False] == digests[None]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("transient_error", FAILED_ON_RESULT_VALIDATION),
        ("persistent_error", RESUME_TO_DISAMBIGUATE),
        ("correct_result", RESUME_TO_DISAMBIGUATE),
    ],
)
def test_a_fault_that_mcore_injects_ends_the_run_as_a_resident_one(tmp_path, fault, code):
    digests = {}
    for offload in (False, True):
        with training(offload) as run:
            configured(run, checkpoint__save=str(tmp_path / str(offload)))
            faulty_machine(run, "validate_results", fault)
            with pytest.raises(SystemExit) as exit:
                train(run, 4)
            assert exit.value.code == code
            assert run.steps == 2, "the first step is not validated"
            digests[offload] = run.digests()
    assert digests[True] == digests[False]
    if code == RESUME_TO_DISAMBIGUATE:
        assert_same_shards(tmp_path / "True", tmp_path / "False")
    else:
        assert not list(tmp_path.rglob("iter_*"))


@pytest.mark.parametrize("other_gpu", [True, False])
def test_a_fault_that_persists_is_rerun_from_a_checkpoint_and_changes_nothing(tmp_path, other_gpu):
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    digests = {}
    for offload in (False, True):
        folder = tmp_path / str(offload)
        with training(offload, checkpoint_exit_step=3) as run:
            configured(run, checkpoint__save=str(folder))
            with pytest.raises(SystemExit) as exit:
                train(run, 6)
            assert exit.value.code == RESUME_TO_DISAMBIGUATE
            before = run.digests()
        with training(offload, checkpoint_exit_step=3) as run:
            load(run, folder)
            if other_gpu:
                get_rerun_state_machine().suspicious_device = "another"
            with pytest.raises(SystemExit) as exit:
                train(run, 6)
            assert exit.value.code == (FAILED_ON_RESULT_VALIDATION if other_gpu else RESUME_TO_DISAMBIGUATE)
            assert max(run.live_bytes) == 0 or not offload
            assert run.digests() == before, "the step that failed has updated nothing"
        digests[offload] = before
    assert digests[True] == digests[False]
    assert_same_shards(tmp_path / "True", tmp_path / "False")


class Fault(RuntimeError):
    """What breaks a step."""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in a forward", "in the optimizer step", "between steps"])
def test_an_in_process_restart_keeps_no_memory_of_the_old_run_and_resumes_bitwise(tmp_path, monkeypatch, where):
    with training(False) as run:
        train(run, 6)
        resident = run.digests()

    cfg = cpu_training.make_config(CpuOptions(offload=True))
    monkeypatch.setattr(cpu_training, "make_config", lambda options: cfg)
    with bridge_fgo.install(SMALL_SLABS):
        run = CpuTraining(CpuOptions(offload=True))
        old = fail(run, tmp_path, where)
        state = run.state
        restart(run)
        del run
        gc.collect()
        assert len(old) > 20 and [what for what, reference in old if reference() is not None] == []
        assert state.cfg is cfg, "Bridge keeps its global state and the config"
        with CpuTraining(CpuOptions(offload=True)) as run:
            load(run, tmp_path)
            for _ in range(3 * run.options.microbatches):
                next(run._batches)
            run._batches.advance()
            seen = train(run, 6)
            assert seen.held == [0, 0, 0]
            assert run.digests() == resident


def fail(run, folder, where):
    """Train, save after the third step, break the fifth; return weak references to all that holds memory."""

    def broken(*args, **kwargs):
        raise Fault(where)

    def break_step(number):
        if number != 5:
            return
        if where == "between steps":
            broken()
        if where == "in a forward":
            run.model[0].module.forward = broken
        else:
            run.optimizer.chained_optimizers[0].optimizer.step = broken

    configured(run, checkpoint__save=str(folder), checkpoint__save_interval=3)
    with pytest.raises(Fault):
        train(run, 6, break_step)
    engine = session_of(run).engine
    (source,) = engine.sources
    leaf = run.optimizer.chained_optimizers[0]
    holders = [session_of(run), engine, source, leaf, leaf.optimizer]
    holders += [thing for slab in engine.slabs for thing in (slab, slab.host, slab.gpu, *tensors(slab))]
    return [(type(holder).__name__, weakref.ref(holder)) for holder in holders]


def tensors(slab):
    return [tensor for state in slab.states if (tensor := state.read()) is not None]


def restart(run):
    """What Bridge's in-process restart does with the old run, in its order (`destroy_state`)."""
    run.close()
    run.state.reset_for_restart()


def test_nvrx_restarts_a_training_in_its_process_and_nothing_of_the_old_one_is_left(tmp_path):
    module = "nvidia_resiliency_ext.inprocess.wrap"
    pytest.importorskip(module, reason="needs nvidia-resiliency-ext", exc_type=ImportError)
    seen = {}
    for function in (restart_child.train, restart_child.train_resident):
        folder = tmp_path / function.__name__
        folder.mkdir()
        assert children.join(children.start(function, str(folder)), "in its restart") == 0
        seen[function] = json.loads((folder / "seen.json").read_text())
    ours, resident = seen.values()
    assert (ours["attempts"], ours["kept"], ours["held"]) == (2, [], [0] * 4)
    assert ours["digests"] == resident["digests"]
