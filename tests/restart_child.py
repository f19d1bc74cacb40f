"""A training that fails once and is restarted in its process by NVRx, as Bridge sets that up."""

import os
import socket
import weakref
from pathlib import Path

import children
import fused_adam
from both import SMALL
from bridge_loop import train as train_loop
from saving import load, skip_data_of

from bridge_fgo.tools.standins.cuda import install_standins

install_standins()

from cpu_training import CpuOptions, CpuTraining  # noqa: E402
from rank_child import keep_results_of_saves  # noqa: E402

import bridge_fgo  # noqa: E402
from bridge_fgo.bridge.session import SESSION  # noqa: E402

SAVED_AFTER, BREAKS_IN, STEPS = 2, 4, 6


def without_a_gpu(inprocess) -> None:
    """Stand for the parts of NVRx that ask for a GPU: its health, a thread on it, and Transformer Engine's abort."""

    def finalize(self, state):
        self.fn(*self.args, **self.kwargs)
        return state

    class NoAbort(inprocess.abort.Abort):
        def __call__(self, state):
            return state

    inprocess.abort.AbortTransformerEngine = NoAbort
    inprocess.finalize.ThreadedFinalize.__call__ = finalize
    for name, cls in vars(inprocess.health_check).items():
        if name.endswith("HealthCheck"):
            cls.__call__ = lambda self, state=None: state


class Attempts:
    """The function that is restarted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.old: list[tuple[str, weakref.ref]] = []
        self.kept: list[str] = []
        self.attempts = 0

    def __call__(self, state, store=None, inprocess_call_wrapper=None):
        self.attempts += 1
        self.kept = [name for name, reference in self.old if reference() is not None]
        run = CpuTraining(CpuOptions(offload=True, **SMALL))
        state.cfg = run.cfg
        run.state = state  # Bridge's, which lives through the restart
        run.cfg.checkpoint.save, run.cfg.checkpoint.save_interval = str(self.folder), SAVED_AFTER
        if self.attempts > 1:
            load(run, self.folder)
            skip_data_of(run, SAVED_AFTER)
        seen = train_loop(run, STEPS, lambda number: self.break_at(number, run))
        return {"held": seen.held, "digests": run.digests(), "kept": self.kept, "attempts": self.attempts}

    def break_at(self, number, run):
        if number == BREAKS_IN and self.attempts == 1:
            session = vars(run.optimizer)[SESSION]
            things = [run.optimizer, session, *(slab.host for slab in session.engine.slabs)]
            self.old = [(type(thing).__name__, weakref.ref(thing)) for thing in things]
            run.model[0].module.forward = None  # not callable: the step breaks in its first forward


def train(rank: int, job: children.Ranks) -> dict:
    """Train, restarted once; return what was seen."""
    import nvidia_resiliency_ext.inprocess as inprocess
    from megatron.bridge.training.config import InProcessRestartConfig
    from megatron.bridge.training.inprocess_restart import maybe_wrap_for_inprocess_restart
    from megatron.bridge.training.state import GlobalState

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    keep_results_of_saves()
    fused_adam.have_mcore_take_it(setattr)
    without_a_gpu(inprocess)
    bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20, master_remainders=True))
    state = GlobalState()
    config = InProcessRestartConfig(enabled=True)
    restarted, store = maybe_wrap_for_inprocess_restart(Attempts(job.folder), config, state)
    return restarted(state, store=store)
