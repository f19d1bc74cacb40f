"""Optimizers with offload and twins without, in the order of calls of a training step, with made-up peaks."""

from functools import partial

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, state_bytes, with_model

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.meters import Ledger
from bridge_fgo.offload.profile import Mark
from bridge_fgo.states.distributed import MegatronSource
from bridge_fgo.states.inner_step import InnerStep

SIZES = [1000, 300, 2000, 64, 1500, 700, 1200]
POINTS = 8
SHAPE = [0, 1, 2, 3, 4, 3, 2, 1, 0]  # of the activations, from point 0 to point POINTS
LAYERS = [0, 1, 2, 3, ~3, ~2, ~1, ~0]  # that pass the points
WHOLE = 12 * sum(SIZES)
MANY_SIZES = [60 + 4 * i for i in range(40)]  # several to a part


def use_small_parts(monkeypatch):
    """Has parts of a few kilobytes, and no margin."""
    monkeypatch.setattr("bridge_fgo.memory.layout.BYTES_WHILE_ENQUEUING", 200)
    monkeypatch.setattr("bridge_fgo.memory.layout.LEAST_PART_BYTES", 4096)
    monkeypatch.setattr("bridge_fgo.engines.offloaded_source.MARGIN_PARTS", 0)
    monkeypatch.setattr("bridge_fgo.offload.policy.MARGIN_SHARE", 0)


def mark(index, layer):
    """Return what passes a point where a layer takes as many bytes of activations."""
    return Mark(LAYERS[index - 1], layer, layer * SHAPE[index])


class Meter:
    """Peaks of what is beside the slabs: `layer` bytes for each layer that has run forward and not yet backward.

    `spike` is a peak, slabs and all, that was reached since it was last asked, and is over.
    """

    works = expands = True
    spike = 0

    def __init__(self, layer, step=0):
        self.layer, self.step = layer, step
        self.schedule = None

    def end_phase(self):
        return 0

    def end_interval(self):
        index = min(self.schedule._index, POINTS)
        others = self.step if self.schedule.recorder.in_step else self.layer * SHAPE[index]
        peak, self.spike = max(others + self.schedule.ledger.nbytes, self.spike), 0
        return peak


class Training:
    """Optimizers with offload, and twins without, in the order of calls of a training step.

    together: bytes of parts that the step moves in one go; None for what the engine takes for so few states.
    Masters are packed from the start; with master_remainders=None a test may choose that as it goes.
    """

    calls = 1
    """How often a pass begins, is released and is reloaded: the verbs are idempotent."""

    def __init__(
        self,
        layer,
        step=0,
        optimizers=1,
        budget=None,
        transfers=None,
        sizes=SIZES,
        together=None,
        meter=None,
        **settings,
    ):
        self.twins = [with_model(make_distributed_optimizer(sizes, seed=i)) for i in range(optimizers)]
        self.optimizers = [with_model(make_distributed_optimizer(sizes, seed=i)) for i in range(optimizers)]
        self.meter = meter = meter or Meter(layer, step)
        gib = budget / 2**30 if isinstance(budget, int) else budget
        settings = {"master_remainders": True, **settings}
        config = OffloadConfig(engine="native", piece_bytes=65536, gpu_memory_budget_gib=gib, **settings)
        self.sources = [MegatronSource(optimizer) for optimizer in self.optimizers]
        self.engine = NativeEngine(self.sources, config, meter, transfers=transfers)
        self.schedule = meter.schedule = self.engine.schedule
        self.schedule.signature = 1
        for source, optimizer in zip(self.sources, self.optimizers, strict=True):
            if together is not None:
                self.engine._offloaded[source].group_bytes = together
            wrapped = optimizer._copy_main_params_to_model_params
            write_back = partial(self.engine.write_back, source, wrapped)
            optimizer._copy_main_params_to_model_params = write_back
        self.held = []

    def slabs(self, source=None):
        """Return the slabs of one source, or of all."""
        return [slab for part in self.parts(source) for slab in part.slabs]

    def parts(self, source=None):
        """Return the parts of one source, or of all."""
        return self.schedule.parts if source is None else self.engine.parts_of(source)

    def run_pass(self, points=POINTS):
        for verb in (self.engine.begin_pass, self.engine.release):
            for _ in range(self.calls):
                verb()
        self.held = [self.schedule.ledger.nbytes]
        for i in range(1, points + 1):
            self.engine.point(mark(i, self.meter.layer))
            self.held.append(self.schedule.ledger.nbytes)
        for _ in range(self.calls):
            self.engine.reload()

    def update(self, seed):
        for optimizer, of_twin, source in zip(self.optimizers, self.twins, self.sources, strict=True):
            for each in (optimizer, of_twin):
                generator = torch.Generator().manual_seed(seed)
                for param in each.optimizer.param_groups[0]["params"]:
                    param.grad = torch.randn(param.shape, generator=generator)
            optimizer.copied.clear()
            with self.engine.stepping(source):
                optimizer.optimizer.step()
                optimizer._copy_main_params_to_model_params()
            of_twin.optimizer.step()
            of_twin._copy_main_params_to_model_params()

    def end_step(self, updated):
        self.engine.settle()
        self.engine.end_step(updated)

    def step(self, seed, passes=1, skip=False, points=POINTS):
        for _ in range(passes):
            self.run_pass(points)
        if not skip:
            self.update(seed)
        self.end_step(updated=not skip)

    def pairs(self, source):
        """Return each parameter of a source's optimizer, and that of its twin."""
        of_twin = self.twins[self.sources.index(source)]
        (group,), (twins,) = source.optimizer.optimizer.param_groups, of_twin.optimizer.param_groups
        return list(zip(group["params"], twins["params"], strict=True))

    def hand_out(self, source, param, twin):
        """Return what a checkpoint is handed of a parameter's states, and what the twin's are; in `saving`."""
        of_twin = self.twins[self.sources.index(source)]
        states = {"param": param, **source.optimizer.optimizer.state.get(param, {})}
        expected = {"param": twin, **of_twin.optimizer.state.get(twin, {})}
        return self.engine.hand_out(source, param, lambda: states), expected

    def check(self):
        self.engine.require_readable()
        for optimizer, of_twin in zip(self.optimizers, self.twins, strict=True):
            assert state_bytes(optimizer) == state_bytes(of_twin)
            pairs = zip(optimizer.model_float16_groups[0], of_twin.model_float16_groups[0], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


def most_held_in(training, run):
    """Run what updates; return the most bytes of slabs that the GPU held in an update."""
    held = []
    update = InnerStep.update

    def spy(inner, owner):
        held.append(training.schedule.ledger.nbytes)
        update(inner, owner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InnerStep, "update", spy)
        run()
    return max(held)


def seen_at_changes(monkeypatch, look):
    """Return a list that gets what `look` returns whenever slabs have taken or given back memory."""
    seen = []
    change = Ledger.change

    def note(ledger, *how):
        result = change(ledger, *how)
        seen.append(look())
        return result

    monkeypatch.setattr(Ledger, "change", note)
    return seen


def held_in_steps(monkeypatch, training):
    """As `seen_at_changes`: the bytes of states that the GPU holds in a step, in slabs or not; 0 beside it."""

    def look():
        if not training.schedule.recorder.in_step:
            return 0
        states = [(slab, state, state.read()) for slab in training.slabs() for state in slab.states]
        alone = sum(state.nbytes for slab, state, tensor in states if tensor is not None and not slab.holds(tensor))
        return training.schedule.ledger.nbytes + alone

    return seen_at_changes(monkeypatch, look)
