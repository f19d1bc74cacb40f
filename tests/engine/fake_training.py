"""Optimizers with offload and twins without, in the order of calls of a training step, with made-up peaks."""

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, state_bytes, with_model

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engine.debug import debugged
from bridge_fgo.engine.inner_step import InnerStep
from bridge_fgo.engine.native import NativeOffloader
from bridge_fgo.engine.schedule import Schedule
from bridge_fgo.engine.slab import Ledger
from bridge_fgo.engine.transfers import HostTransfers

SIZES = [1000, 300, 2000, 64, 1500, 700, 1200]
POINTS = 8
SHAPE = [0, 1, 2, 3, 4, 3, 2, 1, 0]  # of the activations, from point 0 to point POINTS
WHOLE = 12 * sum(SIZES)
MANY_SIZES = [60 + 4 * i for i in range(40)]  # several to a part


def use_small_parts(monkeypatch):
    """Has parts of a few kilobytes, and no margin."""
    monkeypatch.setattr("bridge_fgo.engine.part_layout.BYTES_WHILE_ENQUEUING", 200)
    monkeypatch.setattr("bridge_fgo.engine.part_layout.LEAST_PART_BYTES", 4096)
    monkeypatch.setattr("bridge_fgo.engine.native.MARGIN_PARTS", 0)
    monkeypatch.setattr("bridge_fgo.engine.planner.MARGIN_SHARE", 0)


class Meter:
    """Peaks of what is beside the slabs: `layer` bytes for each layer that has run forward and not yet backward.

    `spike` is a peak, slabs and all, that was reached since it was last asked, and is over.
    """

    works = expands = True
    spike = 0

    def __init__(self, layer, step=0):
        self.layer, self.step = layer, step
        self.schedule = None

    def end_interval(self):
        index = min(self.schedule._index, POINTS)
        others = self.step if self.schedule._in_step_phase else self.layer * SHAPE[index]
        peak, self.spike = max(others + self.schedule.ledger.nbytes, self.spike), 0
        return peak


class Training:
    """Optimizers with offload, and twins without, in the order of calls of a training step.

    together: bytes of parts that the step moves in one go; None for what the engine takes for so few states.
    """

    def __init__(
        self, layer, step=0, optimizers=1, budget=None, transfers=None, sizes=SIZES, together=None, **settings
    ):
        self.twins = [with_model(make_distributed_optimizer(sizes, seed=i)) for i in range(optimizers)]
        self.optimizers = [with_model(make_distributed_optimizer(sizes, seed=i)) for i in range(optimizers)]
        meter = Meter(layer, step)
        self.schedule = meter.schedule = Schedule(transfers or debugged(HostTransfers(65536)), meter, budget)
        self.schedule.signature = 1
        config = OffloadConfig(engine="native", piece_bytes=65536, **settings)
        self.offloaders = [NativeOffloader(optimizer, config, self.schedule) for optimizer in self.optimizers]
        for twin, offloader, optimizer in zip(self.twins, self.offloaders, self.optimizers, strict=True):
            offloader.twin = twin
            if together is not None:
                offloader._together_bytes = together
            wrapped = optimizer._copy_main_params_to_model_params
            optimizer._copy_main_params_to_model_params = lambda o=offloader, w=wrapped: o.copy_masters(w)
        self.held = []

    def run_pass(self, points=POINTS):
        for offloader in self.offloaders:
            offloader.offload()
        for offloader in self.offloaders:
            offloader.release()
        self.schedule.release()  # as `Session.release`
        self.held = [self.schedule.ledger.nbytes]
        for _ in range(points):
            self.schedule.point()
            self.held.append(self.schedule.ledger.nbytes)
        for offloader in self.offloaders:
            offloader.reload()

    def update(self, seed):
        for optimizer, offloader in zip(self.optimizers, self.offloaders, strict=True):
            for twin in (optimizer, offloader.twin):
                generator = torch.Generator().manual_seed(seed)
                for param in twin.optimizer.param_groups[0]["params"]:
                    param.grad = torch.randn(param.shape, generator=generator)
            optimizer.copied.clear()
            with offloader.stepping():
                optimizer.optimizer.step()
                optimizer._copy_main_params_to_model_params()
            offloader.twin.optimizer.step()
            offloader.twin._copy_main_params_to_model_params()

    def end_step(self, updated):
        for offloader in self.offloaders:
            offloader.settle()
        self.schedule.end_step(updated)

    def step(self, seed, passes=1, skip=False, points=POINTS):
        for _ in range(passes):
            self.run_pass(points)
        if not skip:
            self.update(seed)
        self.end_step(updated=not skip)

    def pairs(self, offloader, optimizer):
        """Return each parameter of an optimizer, and that of its twin."""
        (group,), (of_twin,) = optimizer.optimizer.param_groups, offloader.twin.optimizer.param_groups
        return list(zip(group["params"], of_twin["params"], strict=True))

    def hand_out(self, offloader, optimizer, param, twin):
        """Return what a checkpoint is handed of a parameter's states, and what the twin's are; in `saving`."""
        states = {"param": param, **optimizer.optimizer.state.get(param, {})}
        return offloader.hand_out(param, lambda: states), {
            "param": twin,
            **offloader.twin.optimizer.state.get(twin, {}),
        }

    def check(self):
        for optimizer, offloader in zip(self.optimizers, self.offloaders, strict=True):
            offloader.require_readable()
            assert state_bytes(optimizer) == state_bytes(offloader.twin)
            pairs = zip(optimizer.model_float16_groups[0], offloader.twin.model_float16_groups[0], strict=True)
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
        if not training.schedule._in_step_phase:
            return 0
        slabs = [slab.slab for part in training.schedule.parts for slab in part.slabs]
        states = [(slab, ref, ref.tensor()) for slab in slabs for ref in slab.refs]
        alone = sum(ref.nbytes for slab, ref, tensor in states if tensor is not None and not slab.holds(tensor))
        return training.schedule.ledger.nbytes + alone

    return seen_at_changes(monkeypatch, look)
