"""Callbacks between Bridge's own steps that read and write states that are away: bit for bit as resident ones."""

from __future__ import annotations

import copy
import dataclasses
import io
import sys
import types

import pytest
import torch

import bridge_fgo
from bridge_fgo.bridge import state_wrappers
from bridge_fgo.memory.guard import is_guarded
from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining

pytestmark = pytest.mark.usefixtures("cpu_standins")

WHOLE = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20, piece_bytes=2**16)
PACKED = dataclasses.replace(WHOLE, master_remainders=True)
SMALL = {"hidden": 64, "sequence": 16, "vocab": 64}


def masters(training):
    parameters = [p for chunk in training.model for p in chunk.parameters() if p.requires_grad]
    return [p.main_param for p in parameters if getattr(p, "main_param", None) is not None]


def inner(training):
    leaf = getattr(training.optimizer, "chained_optimizers", [training.optimizer])[0]
    return leaf.optimizer


def moments(training):
    values = [value for state in inner(training).state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor) and value.dim()]


def average(training):
    kept = vars(training).setdefault("average", [torch.zeros_like(master) for master in masters(training)])
    for mine, master in zip(kept, masters(training), strict=True):
        mine.lerp_(master, 0.1)
    return [mine.clone() for mine in kept]


def zero_moments(training):
    for moment in moments(training)[::3]:
        moment.zero_()


def to_the_cpu_and_back(training):
    for state in inner(training).state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = value.to("cpu", copy=True).to(value.device)


def other_memory(training):
    for master in masters(training):
        master.data = master.data.clone()


def scale_masters(training):
    for master in masters(training)[::2]:
        master.mul_(1.5)


def saved(training):
    torch.save(inner(training).state_dict(), file := io.BytesIO())
    return [value for value in torch.load(io.BytesIO(file.getvalue()))["state"].values()]


def norm(training):
    from megatron.bridge.training.utils import train_utils  # a loop of one's own has it from here

    return train_utils.calc_params_l2_norm(training.model, training.cfg.model)


ACCESSES = {
    "average_of_the_weights": average,
    "sum_of_masters": lambda t: [master.double().sum() for master in masters(t)],
    "clones_of_masters": lambda t: [master.clone() for master in masters(t)],
    "search_for_nans": lambda t: [torch.isnan(each).any() for each in (*masters(t), *moments(t))],
    "state_dict_that_is_saved": saved,
    "deep_copy_of_the_state_dict": lambda t: copy.deepcopy(inner(t).state_dict()["state"]),
    "sum_of_moments": lambda t: [moment.double().sum() for moment in moments(t)],
    "norm_of_parameters": norm,
    "moments_zeroed": zero_moments,
    "moments_to_the_cpu_and_back": to_the_cpu_and_back,
    "masters_with_other_memory": other_memory,
    "masters_scaled": scale_masters,
    "states_cleared": lambda t: inner(t).state.clear(),
}


def values(found):
    """Return what an access has found, as exact values."""
    if isinstance(found, torch.Tensor):
        return found.tolist()
    if isinstance(found, (list, tuple)):
        return [values(each) for each in found]
    return [values(each) for each in found.values()] if isinstance(found, dict) else found


def trained(offload, names, options):
    """Train with an access after each step; return what steps and accesses have given, and the end's digests."""
    seen = []
    with CpuTraining(CpuOptions(offload=offload, **{**SMALL, **options})) as training:
        training.step()
        for name in names:
            record = training.step()
            if offload and len(seen) % 2:  # else some are on their way out, and others gone
                state_wrappers.make_room(lambda: None, None, (), {})
            with torch.no_grad():
                seen.append((name, record.loss, record.grad_norm, values(ACCESSES[name](training))))
        training.step()
        return seen, training.digests()


def assert_equal(names, options, config):
    resident = trained(False, names, options)
    with bridge_fgo.install(config):
        seen, digests = trained(True, names, options)
        touched = bridge_fgo.stats().touched_bytes
    for mine, of_resident in zip(seen, resident[0], strict=True):
        assert mine == of_resident, mine[0]
    assert digests == resident[1] and touched > 0


CASES = {
    "whole": (list(ACCESSES), {}, WHOLE),
    "packed": (list(ACCESSES), {}, PACKED),
    "experts": (list(ACCESSES), {"experts": True}, PACKED),
    "rerun_and_skipped_steps": (
        list(ACCESSES), {"rerun_steps": frozenset({2, 5, 9}), "found_inf_steps": frozenset({3, 7})}, WHOLE,
    ),
    "not_distributed": (list(ACCESSES), {"distributed": False}, PACKED),
    "muon": (list(ACCESSES), {"optimizer": "muon", "distributed": False}, PACKED),
    "layer_wise_muon": (list(ACCESSES), {"optimizer": "dist_muon", "distributed": False}, PACKED),
}  # fmt: skip
IN_THE_FAST_LANE = ("whole", "packed", "muon")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in IN_THE_FAST_LANE else pytest.mark.slow) for name in CASES]
)
def test_what_callbacks_read_and_write_between_steps_is_bitwise_as_resident(case):
    assert_equal(*CASES[case])


def test_kernels_that_get_lists_of_tensors_find_masters_that_are_away(monkeypatch):
    # As Transformer Engine and Apex have it: a class that hands lists on to C++, which asks no tensor.
    name = "transformer_engine.pytorch.optimizers.multi_tensor_apply"
    module = types.ModuleType(name)

    class MultiTensorApply:
        def __call__(self, op, noop_flag_buffer, tensor_lists, *args):
            return op(tensor_lists, *args)

    module.MultiTensorApply = MultiTensorApply
    monkeypatch.setitem(sys.modules, name, module)

    def in_cpp(lists):
        assert not any(is_guarded(tensor) for tensors in lists for tensor in tensors)
        return [tensor.double().sum().item() for tensors in lists for tensor in tensors]

    original = MultiTensorApply.__call__
    with bridge_fgo.install(WHOLE), CpuTraining(CpuOptions(offload=True, **SMALL)) as training:
        for _ in range(2):
            training.step()
        expected = [master.double().sum().item() for master in masters(training)]
        training.step()
        assert any(is_guarded(master) for master in masters(training))
        assert MultiTensorApply()(in_cpp, None, [masters(training)]) != expected
    assert MultiTensorApply.__call__ is original


def test_hooks_inside_of_a_pass_find_masters_and_the_pass_goes_on():
    def trained(offload):
        seen = []
        with CpuTraining(CpuOptions(offload=offload, **SMALL)) as training:
            for step in range(4):
                handle = None
                if step:
                    layer = next(module for module in training.model[0].modules() if "Layer" in type(module).__name__)
                    handle = layer.register_forward_hook(
                        lambda *how: seen.append([m.double().sum().item() for m in masters(training)[:3]])
                    )
                seen.append(training.step().loss)
                if handle is not None:
                    handle.remove()
            return seen, training.digests()

    resident = trained(False)
    assert len(resident[0]) > 4
    with bridge_fgo.install(PACKED):
        assert trained(True) == resident


def test_what_was_touched_is_said_once_with_its_line_and_counted(capsys):
    with bridge_fgo.install(WHOLE), CpuTraining(CpuOptions(offload=True, **SMALL)) as training:
        for _ in range(4):
            training.step()
            masters(training)[0].sum()
    lines = [line for line in capsys.readouterr().out.splitlines() if "came back" in line]
    assert len(lines) == 1 and "test_touches.py:" in lines[0] and "GiB" in lines[0]
