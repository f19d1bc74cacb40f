"""A CPU training that sleeps: its memory is overwritten before it goes, so that nothing can come back by chance."""

import contextlib
import dataclasses

import both
import cpu_training
import fused_adam
import pytest
from cpu_training import CpuOptions, CpuTraining

import bridge_fgo
from bridge_fgo.memory import host_buffer
from bridge_fgo.memory.slab import StillShared
from bridge_fgo.memory.storage_slab import StorageSlab
from bridge_fgo.states.distributed import live_bytes

SEVERAL_SLABS = {"hidden": 128, "sequence": 32, "vocab": 128}
KINDS = ("params", "grads", "optimizer")
WHOLE = dataclasses.replace(both.WHOLE, master_remainders=False)


def options(**changes):
    """Return the options of a small training."""
    return CpuOptions(**both.SMALL | changes)


def resident(steps, **changes):
    """Return the steps and the bits of a training that never sleeps, and of which no test patches what trains."""
    both.resident(max(steps, 6), **changes)  # shorter ones are its beginning
    record, bits = both.resident(steps, **changes)
    return record.steps, bits


def resident_now(steps, **changes):
    """Return the same of a training that is patched as the test has it."""
    with both.training(False, **changes) as run:
        return [run.step() for _ in range(steps)], both.bits(run)


class Sleeper:
    """A training and its residency."""

    def __init__(self, training, changes, config):
        self.training, self.changes, self.seen = training, changes, []
        self.config = config
        self._res = None

    @property
    def res(self):
        """The residency, made when it is first asked for."""
        if self._res is None:
            self._res = residency(self.training, config=self.config)
        return self._res

    @property
    def ddp(self):
        return self.training.model[0]

    @property
    def leaf(self):
        return self.training.optimizer.chained_optimizers[0]

    @property
    def transfers(self):
        """The class that copies states."""
        return type(self.res._states.engine.schedule.transfers)

    @property
    def moment(self):
        return next(iter(self.leaf.optimizer.state.values()))["exp_avg"]

    @property
    def weight(self):
        return next(self.ddp.parameters())

    @property
    def weights_bytes(self):
        """Bytes of all parameters in DDP's buffers."""
        return sum(buffer.param_data.nbytes for buffer in buffers(self.training))

    def train(self, steps=1):
        """Train on, and return what was seen."""
        self.seen += [self.training.step() for _ in range(steps)]
        return both.numbers(self.seen)

    def states_bytes(self):
        """Return the bytes of memory that masters and moments take now, by the storages themselves."""
        return sum(live_bytes(source.states(), source.device) for source in self.res._states.sources)

    def gone(self):
        """Return the kinds whose memory is empty, by the storages themselves."""
        return gone(self.res)

    def assert_as_resident(self, resident=resident):
        """End the training; check what was seen, and its state, against a training that never sleeps."""
        bits = both.bits(self.training)
        self.training.close()
        steps, expected = resident(len(self.seen), **self.changes)
        assert both.numbers(self.seen) == both.numbers(steps)
        assert bits == expected


@pytest.fixture
def sleeper(cpu_standins, poisoned):
    """A function that makes a `Sleeper`, trained for some steps; one at a time.

    early: makes its residency before the first step, which makes the moments.
    """
    with contextlib.ExitStack() as stack:

        def make(steps=1, config=None, early=False, **changes):
            stack.close()
            made = Sleeper(stack.enter_context(CpuTraining(options(**changes))), changes, config)
            assert not early or made.res is not None
            made.train(steps)
            return made

        yield make


def buffers(training):
    """Return DDP's buffers."""
    return [b for ddp in training.model for b in ddp.buffers + ddp.expert_parallel_buffers]


def gone(res):
    """Return the kinds whose memory is empty, by the storages themselves."""
    found = set()
    for kind, part in (("params", res._weights), ("grads", res._gradients)):
        if all(not slab.storage.nbytes() for slab in part.slabs):
            found.add(kind)
    if res._states is not None and not sum(live_bytes(s.states(), s.device) for s in res._states.sources):
        found.add("optimizer")
    return found


def poison(patch):
    """Have storages be overwritten before they go. patch: a monkeypatch."""
    empty = StorageSlab.empty

    def poisoned(slab):
        if not slab.is_away:
            slab._bytes.fill_(0xFF)
        return empty(slab)

    patch.setattr(StorageSlab, "empty", poisoned)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A folder that is taken for one on a disk: pytest's may be on a tmpfs."""
    monkeypatch.setattr(host_buffer, "file_system", lambda device: "")
    return tmp_path


@pytest.fixture
def poisoned(monkeypatch):
    """Storages are overwritten before they go."""
    poison(monkeypatch)


def configured(change):
    """Return a function that has trainings be configured by another one. change: what it does to a config."""

    def prepare(patch):
        make = cpu_training.make_config

        def make_config(of):
            cfg = make(of)
            change(cfg)
            return cfg

        patch.setattr(cpu_training, "make_config", make_config)

    return prepare


def precision_aware(remainders):
    """Return a function that has mcore build a precision-aware Adam, whose parameters are views of the weights."""

    def change(cfg):
        cfg.optimizer.use_precision_aware_optimizer = True
        cfg.optimizer.store_param_remainders = remainders

    def prepare(patch):
        configured(change)(patch)
        fused_adam.have_mcore_make_it_precision_aware(patch)

    return prepare


def residency(training, **how):
    """Return the residency of a training."""
    return bridge_fgo.Residency(training.model, training.optimizer, **how)


def note(patch, order, owner, name, word, with_slab=False):
    """Append a word, or (word, slab) of a verb of a slab, whenever a method is called. patch: a monkeypatch."""
    method = getattr(owner, name)

    def noted(*of, **how):
        order.append((word, *of[1:2]) if with_slab else word)
        return method(*of, **how)

    patch.setattr(owner, name, noted)


def fail(patch, owner, name, call=2, error=StillShared):
    """Have a call of a method, by default the second, fail. patch: a monkeypatch."""
    act, calls = getattr(owner, name), []

    def fails(*of, **how):
        calls.append(of)
        if len(calls) == call:
            raise error("there was a fault")
        return act(*of, **how)

    patch.setattr(owner, name, fails)
