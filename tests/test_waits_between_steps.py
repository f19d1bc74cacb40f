"""Between steps nothing waits for a copy that the next pass can hide."""

import pytest
import torch
from both import WHOLE, both, session_of
from bridge_loop import train
from fake_meter import FakeMeter, have_sessions_take_it
from saving import configured
from test_loop import EVALUATES, valid_batches

from bridge_fgo.bridge.session import active_session
from bridge_fgo.memory.slab import SlabState

pytestmark = pytest.mark.usefixtures("cpu_standins")

PLANNED = 4  # the first step that prefetches, and so has every state on the GPU before its update
STEPS = 7


def synchronize(context):
    torch.cuda.synchronize()


def return_cached(context):
    torch.cuda.empty_cache()


def profile(context):
    with torch.profiler.profile() as profiler:
        profiler.step()
    torch.cuda.synchronize()  # what CUPTI does as it starts and stops


NO_LOG = {"logger__log_interval": 100}
WAITS = {
    "mcore's timers": ({"logger__log_interval": 1}, None),
    "mcore's timers with barriers": ({"logger__log_interval": 1, "logger__timing_log_level": 2}, None),
    "train_sync_interval": ({"train__train_sync_interval": 1, **NO_LOG}, None),
    "the norm of the parameters": ({"logger__log_params_norm": True, "logger__log_interval": 1}, None),
    "timers of an evaluation": ({**EVALUATES, "validation__eval_interval": 1, **NO_LOG}, None),
    "timers of a checkpoint": ({"checkpoint__save_interval": 1, **NO_LOG}, None),
    "a callback's synchronize()": (NO_LOG, synchronize),
    "a callback's empty_cache()": (NO_LOG, return_cached),
    "a profiler": (NO_LOG, profile),
}
"""Settings, and what a callback does at the end of a step."""


@pytest.mark.parametrize("what", WAITS)
def test_nothing_between_two_steps_waits_for_copies_that_the_next_pass_can_hide(monkeypatch, tmp_path, what):
    settings, act = WAITS[what]
    have_sessions_take_it(monkeypatch.setattr)
    monkeypatch.setattr(FakeMeter, "forward_points", 5)
    monkeypatch.setattr(FakeMeter, "activation", 2**30)  # room for all states before the update
    waits = []

    def trained(run):
        configured(run, validation__eval_micro_batch_size=2, **settings)
        if "checkpoint" in what:
            configured(run, checkpoint__save=str(tmp_path / str(run.options.offload)))
        run.state.train_state.do_valid = True

        def wait(*of):
            if run.options.offload and active_session() is None and run.steps >= PLANNED:
                slabs = session_of(run).engine.slabs
                waits.append(sum(slab.nbytes for slab in slabs if slab.state is SlabState.OFFLOADING))

        with pytest.MonkeyPatch.context() as patch:
            for name in ("synchronize", "empty_cache"):
                patch.setattr(torch.cuda, name, wait)
            seen = train(run, STEPS, valid=valid_batches(run), callback=None if act is None else at_the_end(act))
        return seen.numbers

    both(trained, WHOLE)
    assert len(waits) >= STEPS - PLANNED
    if (
        "checkpoint" in what
    ):  # of its two timers one starts before it, and one stops after it has read the host's copies
        assert waits.count(0) >= len(waits) // 2
    else:
        assert not any(waits)


def at_the_end(act):
    from megatron.bridge.training.callbacks import Callback

    return type("AtTheEnd", (Callback,), {"on_train_step_end": lambda self, context: act(context)})()
