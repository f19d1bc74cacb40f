"""Optimizers with offload and twins without, in the order of calls of a training step, with made-up peaks."""

import math
from collections import deque
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, state_bytes, with_model
from spies import note

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.meters import Ledger
from bridge_fgo.memory.slab_file import buffer_bytes
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

    Gradients are those of the next seed, unless a test names one. Masters are packed unless `master_remainders=False`.

    Args:
        layer, step: bytes beside the slabs, see `Meter`.
        optimizers: how many.
        budget: bytes, or "auto".
        transfers: the copies; by default those of the CPU.
        sizes: elements of the masters of each optimizer.
        together: bytes of parts that the step moves in one go; None for what the engine takes for so few states.
        meter: measures in place of a `Meter`.
        fp32_views: parameters of each optimizer that are views of the parameter buffer.
        quantized: whether masters are copied to the model in one go.
        in_file: a folder for the file of what the host has no room for, which is most of it.
        settings: of the `OffloadConfig`.
    """

    calls = 1  # how often a pass begins, is released and is reloaded: the verbs are idempotent
    made: ClassVar = deque(maxlen=0)  # where each training is noted

    def __init__(
        self,
        layer=0,
        step=0,
        optimizers=1,
        budget=None,
        transfers=None,
        sizes=SIZES,
        together=None,
        meter=None,
        fp32_views=0,
        quantized=False,
        in_file=None,
        **settings,
    ):
        self.twins, self.optimizers = ([_made(sizes, i, fp32_views) for i in range(optimizers)] for _ in range(2))
        for optimizer in self.optimizers:
            optimizer.ddp_config = SimpleNamespace(fp8_param_gather=quantized)
        self.meter = meter = meter or Meter(layer, step)
        gib = budget / 2**30 if isinstance(budget, int) else budget
        settings = {"master_remainders": settings.get("master_weights", True), "piece_bytes": 65536, **settings}
        config = OffloadConfig(engine="native", gpu_memory_budget_gib=gib, **settings)
        self.sources = [MegatronSource(optimizer) for optimizer in self.optimizers]
        host_bytes = math.inf
        if in_file is not None:
            config = replace(config, nvme_folder=in_file, host_memory_gib=1.0)
            host_bytes = buffer_bytes([4 * max(sizes) * 2]) + WHOLE // 4
        self.engine = NativeEngine(self.sources, config, meter, transfers=transfers, host_bytes=host_bytes)

        self.schedule = meter.schedule = self.engine.schedule
        self.schedule.kind = 1
        self.said = []
        self.schedule.holding.warn = self.said.append
        for source, optimizer in zip(self.sources, self.optimizers, strict=True):
            if together is not None:
                self.engine._offloaded[source].group_bytes = together
            wrapped = optimizer._copy_main_params_to_model_params
            optimizer._copy_main_params_to_model_params = partial(self.engine.write_back, source, wrapped)
        self.held, self.seed = [], 0
        self.made.append(self)

    def slabs(self, source=None):
        """Return the slabs of one source, or of all."""
        return [slab for part in self.parts(source) for slab in part.slabs]

    def parts(self, source=None):
        """Return the parts of one source, or of all."""
        return self.schedule.parts if source is None else self.engine._offloaded[source].parts

    @property
    def whole(self):
        """Bytes of all states that are offloaded."""
        return sum(part.nbytes for part in self.parts())

    @property
    def staying(self):
        """Bytes of states that stay on the GPU."""
        return sum(part.nbytes for part in self.parts() if part.stays)

    @property
    def residencies(self):
        """States of all slabs."""
        return {slab.state for slab in self.slabs()}

    def pack(self, packs):
        """Have masters that are offloaded from now on be packed or not, if they can be."""
        self.engine.masters.remainders.is_paused = not packs

    # A step.

    def begin(self):
        for verb in (self.engine.begin_pass, self.engine.release):
            for _ in range(self.calls):
                verb()

    def away(self):
        """Have all states be away, in the midst of a pass."""
        self.begin()
        self.engine.offload_now()

    def run_pass(self, points=POINTS):
        self.begin()
        self.held = [self.schedule.ledger.nbytes]
        for i in range(1, points + 1):
            self.engine.point(mark(i, self.meter.layer))
            self.held.append(self.schedule.ledger.nbytes)
        for _ in range(self.calls):
            self.engine.reload()

    def next_seed(self):
        self.seed += 1
        return self.seed

    def give_grads(self, of_both, seed=None):
        """Give an optimizer and its twin the same gradients."""
        seed = self.next_seed() if seed is None else seed
        for each in of_both:
            generator = torch.Generator().manual_seed(seed)
            for param in each.optimizer.param_groups[0]["params"]:
                param.grad = torch.randn(param.shape, generator=generator)

    def update(self, seed=None):
        """Update all optimizers, and the twins."""
        seed = self.next_seed() if seed is None else seed
        for source in self.sources:
            self.update_one(source, seed)

    def update_one(self, source, seed=None):
        optimizer, of_twin = self.both(source)
        self.give_grads((optimizer, of_twin), seed)
        optimizer.copied.clear()
        with self.engine.stepping(source):
            optimizer.optimizer.step()
            optimizer._copy_main_params_to_model_params()
        assert sorted(optimizer.copied) == sorted(map(id, masters_of(optimizer))), "each master once"
        of_twin.optimizer.step()
        of_twin._copy_main_params_to_model_params()

    def end_step(self, updated=True):
        self.engine.settle()
        self.engine.end_step(updated)

    def finish(self, seed=None):
        """Update, and end the step, after a pass."""
        self.update(seed)
        self.end_step()

    def step(self, seed=None, passes=1, skip=False, points=POINTS):
        with self.engine.training_step(self.schedule.kind):
            for _ in range(passes):
                self.run_pass(points)
            if not skip:
                self.engine.updating()
                self.update(seed)
            self.engine.settle()
        self.engine.end_step(updated=not skip)

    def steps(self, count, **how):
        for _ in range(count):
            self.step(**how)

    # Readers.

    def both(self, source):
        """Return a source's optimizer, and its twin."""
        return source.optimizer, self.twins[self.sources.index(source)]

    def pairs(self, source):
        """Return each parameter of a source's optimizer, and that of its twin."""
        (group,), (twins,) = (one.optimizer.param_groups for one in self.both(source))
        return list(zip(group["params"], twins["params"], strict=True))

    def states(self, source=None):
        """Return each state that may be offloaded of all parameters, and that of the twin."""
        found = []
        for each in self.sources if source is None else [source]:
            mine, of_twin = (one.optimizer.state for one in self.both(each))
            for param, twin in self.pairs(each):
                found.append((param, twin))
                found += [(mine[param][n], of_twin[twin][n]) for n in ("exp_avg", "exp_avg_sq") if param in mine]
        return found

    def hand_out(self, source, param, twin):
        """Return what a checkpoint is handed of a parameter's states, and what the twin's are; in `saving`."""
        optimizer, of_twin = self.both(source)
        states = {"param": param, **optimizer.optimizer.state.get(param, {})}
        expected = {"param": twin, **of_twin.optimizer.state.get(twin, {})}
        return self.engine.hand_out(source, param, lambda: states), expected

    def saved(self, source, copies=True):
        """Save a source's states; return the tensors that a writer gets, after a check that they are the twin's."""
        with self.engine.saving(source, copies):
            assert [each for each in self.sources if self.engine.is_checkpointing(each)] == [source]
            if not copies:  # what is not copied is of use in the block alone
                return self.handed(source)
            pairs = [self.hand_out(source, *pair) for pair in self.pairs(source)]
        return _same(pairs)  # what is lent has landed at the end of the block

    def handed(self, source):
        """Return the tensors that are handed out of all parameters, after a check that they are the twin's."""
        return _same(self.hand_out(source, *pair) for pair in self.pairs(source))

    def check(self):
        self.engine.require_readable()
        for source in self.sources:
            self.check_one(source)

    def check_one(self, source):
        optimizer, of_twin = self.both(source)
        assert state_bytes(optimizer) == state_bytes(of_twin)
        pairs = zip(optimizer.model_float16_groups[0], of_twin.model_float16_groups[0], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def _same(pairs):
    tensors = []
    for handed, expected in pairs:
        assert handed.keys() == expected.keys()
        assert all(torch.equal(handed[name], expected[name]) for name in expected)
        tensors += [value for value in handed.values() if value.dim()]  # torch's count of steps is in no slab
    return tensors


def trained(steps=3, **how):
    """Return a training that is some steps old."""
    training = Training(**how)
    training.steps(steps)
    return training


def _made(sizes, seed, fp32_views):
    return with_model(make_distributed_optimizer(sizes, seed, fp32_views))


def masters_of(optimizer):
    return optimizer.shard_fp32_from_float16_groups[0]


def weights_of(optimizer):
    return optimizer.model_float16_groups[0]


def most_held_in(training, run):
    """Run what updates; return the most bytes of slabs that the GPU held in an update."""
    held = []
    with pytest.MonkeyPatch.context() as patch:
        note(patch, held, InnerStep, "update", lambda *_: training.schedule.ledger.nbytes)
        run()
    return max(held)


def seen_at_changes(monkeypatch, look):
    """Return a list that gets what `look` returns whenever slabs have taken or given back memory."""
    seen = []
    change = Ledger.change

    def changed(ledger, *how):
        result = change(ledger, *how)
        seen.append(look())
        return result

    monkeypatch.setattr(Ledger, "change", changed)
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
