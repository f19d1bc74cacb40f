"""A failed training restarts bitwise, from a checkpoint or in its process."""

import gc
import weakref

import cpu_training
import pytest
from both import PACKED, SMALL, bits, both, session_of, training
from bridge_loop import train
from cpu_training import CpuOptions, CpuTraining
from saving import assert_same_shards, configured, load, skip_data_of

import bridge_fgo

RESUME_TO_DISAMBIGUATE, FAILED_ON_RESULT_VALIDATION = 16, 17
"""Exit codes of mcore's rerun state machine."""


pytestmark = pytest.mark.usefixtures("fused_adam_in_mcore")


def exits(run, folder, code):
    """Train, with checkpoints in `folder`, until Bridge ends the process with this code."""
    configured(run, checkpoint__save=str(folder / str(run.options.offload)))
    with pytest.raises(SystemExit) as exit:
        train(run, 6)
    assert exit.value.code == code


@pytest.mark.parametrize("other_gpu", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_fault_that_persists_is_rerun_from_a_checkpoint_and_changes_nothing(tmp_path, other_gpu):
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    def failed(run):
        exits(run, tmp_path, RESUME_TO_DISAMBIGUATE)
        return bits(run)

    def run_again(run):
        load(run, tmp_path / str(run.options.offload))
        if other_gpu:
            get_rerun_state_machine().suspicious_device = "another"
        exits(run, tmp_path, FAILED_ON_RESULT_VALIDATION if other_gpu else RESUME_TO_DISAMBIGUATE)
        assert max(run.live_bytes) == 0 or not run.options.offload
        return bits(run)

    before, _ = both(failed, checkpoint_exit_step=3)
    after, _ = both(run_again, checkpoint_exit_step=3)
    assert after == before, "the step that failed has updated nothing"
    assert_same_shards(tmp_path / "True", tmp_path / "False")


class Fault(RuntimeError):
    """What breaks a step."""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in a forward", "in the optimizer step", "between steps"])
def test_an_in_process_restart_keeps_no_memory_of_the_old_run_and_resumes_bitwise(tmp_path, monkeypatch, where):
    with training(False) as run:
        train(run, 6)
        end = bits(run)

    cfg = cpu_training.make_config(CpuOptions(offload=True, **SMALL))
    monkeypatch.setattr(cpu_training, "make_config", lambda options: cfg)
    with bridge_fgo.install(PACKED):
        run = CpuTraining(CpuOptions(offload=True, **SMALL))
        old = fail(run, tmp_path, where)
        state = run.state
        restart(run)
        del run
        gc.collect()
        assert len(old) > 20 and [what for what, reference in old if reference() is not None] == []
        assert state.cfg is cfg, "Bridge keeps its global state and the config"
        with CpuTraining(CpuOptions(offload=True, **SMALL)) as run:
            load(run, tmp_path)
            skip_data_of(run, 3)
            seen = train(run, 6)
            assert seen.held == [0, 0, 0]
            assert bits(run) == end


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
