"""Callbacks read and write offloaded states bitwise as resident ones."""

import copy
import dataclasses
import io
import re
import sys
import tempfile
import types

import pytest
import torch
from both import OPTIMIZERS, PACKED, WHOLE, bits, both, exact, inner, masters, release, session_of, steps, training
from lanes import in_lanes
from saving import send_all_away, tensors_in

import bridge_fgo
from bridge_fgo.bridge import state_wrappers
from bridge_fgo.memory.guard import is_guarded

pytestmark = pytest.mark.usefixtures("cpu_standins")


def moments(training):
    values = [value for state in inner(training).state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor) and value.dim()]


def average(training):
    kept = vars(training).setdefault("average", [torch.zeros_like(master) for master in masters(training)])
    for mine, master in zip(kept, masters(training), strict=True):
        mine.lerp_(master, 0.1)
    return [mine.clone() for mine in kept]


def to_the_cpu_and_back(training):
    for state in inner(training).state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = value.to("cpu", copy=True).to(value.device)


def other_memory(training):
    for master in masters(training):
        master.data = master.data.clone()


def saved(training):
    torch.save(inner(training).state_dict(), file := io.BytesIO())
    return [value for value in torch.load(io.BytesIO(file.getvalue()))["state"].values()]


def views_that_are_kept(training):
    """Halve states by views that were made once, in the first call."""
    views = vars(training).setdefault("views", [each.detach() for each in (*masters(training), *moments(training))])
    return [view.mul_(0.5).clone() for view in views]


def norm(training):
    from megatron.bridge.training.utils import train_utils  # a loop of one's own has it from here

    return train_utils.calc_params_l2_norm(training.model, training.cfg.model)


def scaled_after_reload_states(training):
    """Write states while slabs are on their way to the host with the bytes of before; return what a save reads."""
    bridge_fgo.reload_states()
    for kind, factor in (("masters", 1.25), ("moments", 0.5)):
        for _, tensor in training.state_tensors()[kind]:
            tensor.data.mul_(factor)
    leaf = training.optimizer.chained_optimizers[0]
    return leaf.get_parameter_state_dp_zero() if training.options.distributed else loadable(training)


def weights_loaded(training):
    # Without the gate the write goes into freed storage, and the next reload brings stale bytes.
    release(training)
    for parameter in (parameter for chunk in training.model for parameter in chunk.parameters()):
        parameter.mul_(0.75)
    training.optimizer.reload_model_params()
    assert not training.offloads_all or training.live_state_bytes() == 0, "written part by part, and away again"
    bridge_fgo.reload_states()
    release(training)
    training.optimizer.chained_optimizers[0].state_dict()


def state_dict_that_is_kept(training):
    """Return a copy of a dictionary that shares no memory with states, and is the same after another step."""
    release(training)
    found = training.optimizer.state_dict()
    kept = copy.deepcopy(found)
    assert training.options.distributed or len(list(tensors_in(found))) > 30
    slabs = session_of(training).engine.slabs if training.offloads_all else []
    spans = [(s.host.address, s.host.address + s.nbytes) for s in slabs]
    mine = {s.gpu.untyped_storage()._cdata for s in slabs}
    for _, tensor in tensors_in(found):
        assert tensor.untyped_storage()._cdata not in mine
        assert not any(start <= tensor.data_ptr() < end for start, end in spans)
    steps(training)
    assert not training.offloads_all or exact(found) == exact(kept), "of a resident run it is the states themselves"
    return kept


def loadable(training):
    """Return a copy of torch's state dictionary, which a DistributedOptimizer has not."""
    found = {} if training.options.distributed else copy.deepcopy(training.optimizer.state_dict())
    return dict(enumerate(found)) if isinstance(found, list) else found


def load(training, state_dict):
    release(training)
    if not training.options.distributed:
        training.optimizer.load_state_dict(state_dict)


def back_in_time(training):
    kept = loadable(training)
    steps(training, 2)
    load(training, kept)
    return bits(training)


def a_file_of_the_layer_wise_optimizers_own(training):
    if training.options.optimizer != "dist_muon":
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/states.pt"
        release(training)
        training.optimizer.save_state_dict_to_file(file)
        steps(training, 2)
        release(training)
        training.optimizer.load_state_dict_from_file(file)
        assert not training.offloads_all or training.live_state_bytes() == 0
        found = torch.load(file)
    assert len(list(tensors_in(found))) > 30
    return found


ACCESSES = {
    "average_of_the_weights": average,
    "sum_of_masters": lambda t: [master.double().sum() for master in masters(t)],
    "clones_of_masters": lambda t: [master.clone() for master in masters(t)],
    "search_for_nans": lambda t: [torch.isnan(each).any() for each in (*masters(t), *moments(t))],
    "state_dict_that_is_saved": saved,
    "deep_copy_of_the_state_dict": lambda t: copy.deepcopy(inner(t).state_dict()["state"]),
    "sum_of_moments": lambda t: [moment.double().sum() for moment in moments(t)],
    "norm_of_parameters": norm,
    "moments_zeroed": lambda t: [moment.zero_().sum() for moment in moments(t)[::3]],
    "moments_to_the_cpu_and_back": to_the_cpu_and_back,
    "masters_with_other_memory": other_memory,
    "views_that_are_made": views_that_are_kept,
    "views_that_were_made": views_that_are_kept,
    "masters_scaled": lambda t: [master.mul_(1.5).sum() for master in masters(t)[::2]],
    "states_cleared": lambda t: inner(t).state.clear(),
}
"""Accesses that use a model, an optimizer and a config alone, so that `tests/gpu/changed_arm.py` can make them too."""
MORE_ACCESSES = {
    "written_after_reload_states": scaled_after_reload_states,
    "weights_loaded": weights_loaded,
    "state_dict_that_is_kept": state_dict_that_is_kept,
    "state_dict_of_before": back_in_time,
    "a_file_of_the_layer_wise_optimizers_own": a_file_of_the_layer_wise_optimizers_own,
    "state_dict_from_before_the_first_step": lambda t: load(t, t.first),
}
CASES = {
    "whole": (WHOLE, {}),
    "packed": (PACKED, {}),
    "experts": (PACKED, {"experts": True}),
    "rerun_and_skipped_steps": (WHOLE, {"rerun_steps": frozenset({2, 5, 9}), "found_inf_steps": frozenset({3, 7})}),
    "not_distributed": (PACKED, OPTIMIZERS["adam"]),
    "muon": (PACKED, OPTIMIZERS["muon"]),
    "layer_wise_muon": (PACKED, OPTIMIZERS["dist_muon"]),
    "half_of_muon": (dataclasses.replace(WHOLE, fraction=0.5), OPTIMIZERS["muon"]),
}


@pytest.mark.parametrize("case", in_lanes(CASES, ("packed", "layer_wise_muon")))
def test_what_callbacks_read_and_write_between_steps_is_bitwise_as_resident(case, capsys):
    def accessed(run):
        run.first = loadable(run)
        seen = [steps(run)]
        for number, (name, access) in enumerate({**ACCESSES, **MORE_ACCESSES}.items()):
            seen += steps(run)
            if number % 2:  # else some are on their way out, and others gone
                state_wrappers.make_room(lambda: None, None, (), {})
            with torch.no_grad():
                seen.append((name, access(run)))
        seen += steps(run)
        assert not run.options.offload or bridge_fgo.stats().touched_bytes > 0
        return seen

    config, options = CASES[case]
    both(accessed, config, **options)
    said = [line for line in capsys.readouterr().out.splitlines() if "came back" in line]
    places = [re.search(r"\S+\.py:\d+", line)[0] for line in said]
    assert len(set(places)) == len(places) and any("test_touches.py:" in place for place in places), "each line once"


def swap_data(run, aside):
    for number, tensor in enumerate([*masters(run), *moments(run)]):
        other = aside[number] if number in aside else tensor.detach().clone()
        aside[number], tensor.data = tensor.data, other


def swap_entries(run, aside):
    for number, state in enumerate(inner(run).state.values()):
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                key = number, name
                aside[key], state[name] = tensor, aside[key] if key in aside else tensor.clone()


@pytest.mark.parametrize("swap", [swap_data, swap_entries])
@pytest.mark.parametrize("adam", [None, "te"])
def test_states_that_take_turns_in_a_tensor_or_an_entry_are_bitwise_those_of_a_resident_run(swap, adam):
    def trained(run):
        aside, seen = {}, []
        run.offloads_all = False  # what was put in between is on the GPU until a step takes it
        for number in range(8):
            seen.append(steps(run))
            swap(run, aside)
            if number in (1, 2, 5):
                seen.append(exact(list(aside.values())))
        return seen

    both(trained, adam=adam)


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
    with training(True, WHOLE) as run:
        steps(run, 2)
        expected = [master.double().sum().item() for master in masters(run)]
        steps(run)
        assert any(is_guarded(master) for master in masters(run))
        assert MultiTensorApply()(in_cpp, None, [masters(run)]) != expected
    assert MultiTensorApply.__call__ is original


def test_hooks_inside_of_a_pass_find_masters_and_the_pass_goes_on():
    def hooked(run):
        seen = [steps(run)]
        layer = next(module for module in run.model[0].modules() if "Layer" in type(module).__name__)
        layer.register_forward_hook(lambda *how: seen.append([m.double().sum() for m in masters(run)[:3]]))
        run.offloads_all = False  # what is touched is there in the next forward
        seen += steps(run, 3)
        assert len(seen) > 4
        return seen

    both(hooked)


def note_largest_logits(run):
    """Have each layer's attention keep its largest logit of each head, as Transformer Engine's does for QK-clip."""

    def note(attention, args):
        query, key = (tensor.detach().float() for tensor in args[:2])  # (sequence, batch, heads, channels)
        largest = torch.einsum("sbhc,tbhc->hbst", query, key).flatten(1).amax(1) / query.shape[-1] ** 0.5
        before = attention.current_max_attn_logits
        attention.current_max_attn_logits = largest if before is None else torch.maximum(before, largest)

    for layer in run.model[0].module.module.decoder.layers:
        attention = layer.self_attention.core_attention
        attention.current_max_attn_logits = None
        attention.register_forward_pre_hook(note)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("muon", PACKED),
        pytest.param("muon", WHOLE, marks=pytest.mark.slow),
        pytest.param("adam", PACKED, marks=pytest.mark.slow),
        pytest.param("dist_muon", PACKED, marks=pytest.mark.slow),
    ],
)
def test_mcores_qk_clip_scales_weights_and_masters_that_are_away(monkeypatch, name, config):
    from megatron.core.transformer.attention import SelfAttention

    clip = SelfAttention._clip_linear_qkv

    def clipped(run):
        scaled = []

        def noted(attention, weight):
            before = weight.clone()
            result = clip(attention, weight)
            scaled.append((str(weight.dtype), bool((result != before).any())))
            return result

        monkeypatch.setattr(SelfAttention, "_clip_linear_qkv", noted)
        run.cfg.model.qk_clip, run.cfg.model.qk_clip_threshold = True, 0.05
        note_largest_logits(run)
        seen = steps(run, 4)
        assert set(scaled) == {("torch.float32", True), ("torch.bfloat16", True)}, "each changed master and weight"
        return seen, scaled

    trouble = {"rerun_steps": frozenset({2}), "grad_norm_skip_steps": frozenset({4})}
    both(clipped, config, **OPTIMIZERS[name], **trouble)


def test_whoever_asks_megatron_fsdps_model_for_its_state_dictionary_between_steps_finds_the_masters():
    def asked(run):
        steps(run)
        send_all_away()
        state = run.model[0].state_dict()
        found = {name: value for name, value in state.items() if torch.is_tensor(value)}
        assert found
        return found

    both(asked, WHOLE, adam="te", fsdp="optim_grads_params")
