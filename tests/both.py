"""A training with its states resident and the same with offload, compared bit for bit."""

import contextlib
import dataclasses
import hashlib
import os

import cpu_training
import fused_adam
import pytest
import torch
from cpu_training import CpuOptions, CpuTraining, StepRecord
from spies import before
from torch.distributed.tensor import DTensor

import bridge_fgo
from bridge_fgo.bridge.session import SESSION
from bridge_fgo.memory import layout
from bridge_fgo.memory.storage_slab import StorageSlab
from harness.arms.final_state import mcore_optimizers

WHOLE = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20, piece_bytes=2**16)
PACKED = dataclasses.replace(WHOLE, master_remainders=True)
SMALL = {"hidden": 64, "sequence": 16, "vocab": 64}
"""Options of a model that trains in half the time of `CpuOptions`' own."""
PART_BYTES = 2**18
"""Upper bound for `memory.layout.LEAST_PART_BYTES` with which that model has several parts."""

OPTIMIZERS = {
    "adam": {"distributed": False},
    "muon": {"distributed": False, "optimizer": "muon"},
    "dist_muon": {"distributed": False, "optimizer": "dist_muon"},
}
"""Options of those with masters of whole parameters, under mcore's Float16OptimizerWithFloat16Params."""

CONFIGURED = {
    "tied_embeddings": {"model.share_embeddings_and_output_weights": True},
    "fp32_local_accumulation": {
        "ddp.param_name_patterns_for_fp32_local_accumulation": ("*linear_fc1*", "*word_embeddings*"),
        "ddp.grad_reduce_in_fp32": False,
    },
    "full_recompute": {
        "model.recompute_granularity": "full",
        "model.recompute_method": "uniform",
        "model.recompute_num_layers": 1,
    },
}
"""Settings of Bridge's config, by "section.name", with which gradients are summed, kept or made in other ways."""


def poison(patch):
    """Have storages be overwritten before they go. patch: a monkeypatch."""
    before(patch, StorageSlab, "empty", lambda slab: slab.is_away or slab._bytes.fill_(0xFF))


@contextlib.contextmanager
def training(offload, config=PACKED, adam=None, cls=CpuTraining, installed=True, configured=None, **options):
    """A CPU training, with the package installed where it is to offload; masters are packed only where they can be.

    installed: False where the caller installs the package later.

    adam: None for torch's AdamW, "te" for one that counts as Transformer Engine's, or the dtypes of a precision-aware
        one, by fields of OptimizerConfig.

    configured: what Bridge's config has otherwise, by "section.name".
    """
    options = CpuOptions(offload=offload, **SMALL | options)
    if isinstance(adam, dict) or options.fsdp is not None or options.precision == "fp16":
        config = dataclasses.replace(config, master_remainders=False)
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(layout, "LEAST_PART_BYTES", min(PART_BYTES, layout.LEAST_PART_BYTES))
        if adam == "te":
            fused_adam.have_mcore_take_it(patch.setattr)
        elif adam is not None:
            asked = {"use_precision_aware_optimizer": True, **adam}
            configured = {f"optimizer.{name}": value for name, value in asked.items()} | (configured or {})
            fused_adam.have_mcore_make_it_precision_aware(patch)
        configure_trainings(patch.setattr, configured or {})
        if offload and installed:
            stack.enter_context(bridge_fgo.install(config))
        run = stack.enter_context(cls(options))
        run.offloads_all = offload and config.fraction == 1 and config.moments and config.master_weights
        yield run


def configure_trainings(set_attribute, changes):
    """Have CPU trainings configured otherwise: `changes` by "section.name". set_attribute: `setattr`, or a patch's."""
    make_config = cpu_training.make_config

    def make(options):
        cfg = make_config(options)
        for path, value in changes.items():
            section, name = path.split(".")
            assert hasattr(getattr(cfg, section), name), path
            setattr(getattr(cfg, section), name, value)
        return cfg

    set_attribute(cpu_training, "make_config", make)


def session_of(run):
    return vars(run.optimizer)[SESSION]


def inner(run):
    """Return the optimizer inside of a training's first one of mcore's."""
    return getattr(run.optimizer, "chained_optimizers", [run.optimizer])[0].optimizer


def masters(run):
    """Return the masters of all parameters that have one, by the parameters."""
    parameters = [p for chunk in run.model for p in chunk.parameters() if p.requires_grad]
    return [p.main_param for p in parameters if getattr(p, "main_param", None) is not None]


def release(run):
    """Take a training to where its states are released, as in a forward pass; nothing if it is resident."""
    if run.options.offload:
        session_of(run).begin_pass()
        session_of(run).release()
        assert not run.offloads_all or run.live_state_bytes() == 0


def steps(run, count=1):
    """Train; return what each step reported, as exact values. With offload, no state is on the GPU in a forward."""
    records = []
    for _ in range(count):
        records.append(run.step())
        assert not run.offloads_all or max(run.live_bytes) == 0, "a state was there in a forward"
    return numbers(records)


def numbers(records):
    """Return what steps reported, as exact values."""
    return exact([(s.loss, s.grad_norm, s.skipped, s.passes, s.should_checkpoint, s.exit_code) for s in records])


def exact(value):
    """Return nested values with digests of bytes in the place of tensors, so that `==` compares bit for bit."""
    if isinstance(value, DTensor):
        value = value._local_tensor
    if isinstance(value, torch.Tensor):
        # Of a clone: what numpy has seen cannot be emptied any more.
        flat = value.detach().clone().contiguous().view(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), hashlib.sha256(flat.numpy()).hexdigest()
    if isinstance(value, dict):
        return {key: exact(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [exact(each) for each in value]
    if isinstance(value, float):
        return value.hex()
    if type(value).__name__ == "ShardedTensor":  # of mcore's checkpoints
        return exact(value.data)
    return value


def bits(run):
    """Return every weight, master and moment of a training, and counts of steps and scales, by name and as `exact`."""
    bridge_fgo.reload_states()
    found = {f"{kind} {name}": tensor for kind, pairs in run.state_tensors().items() for name, tensor in pairs}
    for number, leaf in enumerate(mcore_optimizers(run.optimizer)):
        if leaf.optimizer is None:  # a stub: nothing to train
            continue
        for index, group in enumerate(leaf.optimizer.param_groups):
            found[f"steps {number}.{index}"] = group.get("step")
            for place, param in enumerate(group["params"]):
                found[f"steps {number}.{index}.{place}"] = leaf.optimizer.state.get(param, {}).get("step")
                found[f"scales {number}.{index}.{place}"] = getattr(leaf.optimizer, "_scales", {}).get(param)
    return exact(found)


def both(script, config=PACKED, **options):
    """Run `script(run)` resident and offloaded: what it returns, and all bits at the end, are equal.

    options: of `training`. Returns what the script has returned, of the resident run first.
    """
    returned, ends = [], []
    for offload in (False, True):
        with training(offload, config, **options) as run:
            returned.append(script(run))
            ends.append(bits(run))
            assert run.live_state_bytes() > 0, "states are on the GPU after they were read"
    assert exact(returned[1]) == exact(returned[0])
    assert ends[1] == ends[0]
    return returned


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """Steps of a run, the bytes of state that are on the GPU after them, and the most as a forward began."""

    steps: tuple[StepRecord, ...] = ()
    state_bytes: int = 0
    peak_forward_backward_bytes: int = 0

    def after_a_step(self, run):
        """Run another step; return the record with it."""
        steps = (*self.steps, run.step())
        return RunRecord(steps, run.live_state_bytes(), max(self.peak_forward_backward_bytes, *run.live_bytes))


_kept: dict[tuple, list[tuple[RunRecord, dict]]] = {}
"""Keeps, for each resident training, the record and the bits after each step."""


def resident(count, adam=None, configured=None, **options):
    """Return the record and the bits of so many resident steps, or fewer where Bridge ends the run.

    Trains once for all tests of a module: the longest run has the shorter ones in it. Not for a test that patches what
    trains.
    """
    # Modules differ in what changes bits: in threads, whose sums are rounded otherwise, and in what they patch.
    module = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
    key = module, torch.get_num_threads(), str((adam, configured)), CpuOptions(**options)
    kept = _kept.get(key, [])
    if len(kept) < count and not (kept and kept[-1][0].steps[-1].exit_code is not None):
        kept, record = _kept.setdefault(key, []), RunRecord()
        kept.clear()
        with training(False, adam=adam, configured=configured, **options) as run:
            while len(kept) < count and not run.exited:
                record = record.after_a_step(run)
                kept.append((record, bits(run)))
    return kept[min(count, len(kept)) - 1]


@contextlib.contextmanager
def as_resident(count, config=PACKED, adam=None, **options):
    """A training with offload that has to end with the bits of a resident one after so many steps."""
    end = resident(count, adam, **options)[1]
    with training(True, config, adam, **options) as run:
        yield run
        assert bits(run) == end


def same_steps(config, count, adam=None, **options):
    """Train resident and offloaded, and assert that numbers and bits are equal.

    Returns:
        Both records, and the newest figures of the offloaded run.
    """
    expected, end = resident(count, adam, **options)
    record = RunRecord()
    with training(True, config, adam, **options) as run:
        while len(record.steps) < count and not run.exited:
            record = record.after_a_step(run)
        stats = bridge_fgo.stats()
        assert numbers(record.steps) == numbers(expected.steps)
        assert bits(run) == end
        return expected, dataclasses.replace(record, state_bytes=run.live_state_bytes()), stats
