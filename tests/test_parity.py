"""Eight steps with each optimizer are bitwise those of a resident run."""

import dataclasses
import sys
from types import FunctionType

import pytest
import torch
from both import OPTIMIZERS, PACKED, WHOLE, bits, numbers, resident, same_steps, session_of, steps, training
from lanes import in_lanes
from spies import note

import bridge_fgo
from bridge_fgo.offload.schedule import Schedule

pytestmark = pytest.mark.usefixtures("cpu_standins")

STEPS = 8
TROUBLE = {"rerun_steps": frozenset({2, 5}), "grad_norm_skip_steps": frozenset({4, 7})}
TROUBLE_UNDER_FSDP = {"rerun_steps": frozenset({2, 5}), "found_inf_steps": frozenset({4, 7})}
"""There mcore skips no step for its norm."""
ADAM, MUON, DIST_MUON = OPTIMIZERS.values()
FSDP = {"fsdp": "optim_grads_params"}
BF16_MOMENTS = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), torch.bfloat16)
FP16_MOMENTS = dict.fromkeys(BF16_MOMENTS, torch.float16)
FP16_MASTERS = {"store_param_remainders": False, "main_params_dtype": torch.float16}
"""As the recipes of Nemotron 3 Super have them."""


def row(config=PACKED, slow=False, **options):
    return config, options, slow


ROWS = {
    "plain": row(),
    "plain, masters whole": row(WHOLE, slow=True),
    "two model chunks": row(slow=True, chunks=2),
    "two model chunks with overlapped grad reduce": row(chunks=2, overlap_grad_reduce=True),
    "chained optimizers": row(experts=True),
    "native fp32 parameters": row(precision="fp32_params"),
    "fp16 with loss scaling": row(precision="fp16"),
    "most parameters frozen": row(slow=True, frozen=True),
    "found_inf, reruns and grad norm skips": row(**TROUBLE, found_inf_steps=frozenset({3, 6})),
    "lengths that change": row(sequence=32, lengths=(4, 32)),
    "an early exit to a checkpoint": row(checkpoint_exit_step=4),
    "fp16 masters, bf16 moments": row(adam=FP16_MASTERS | BF16_MOMENTS, **TROUBLE),
    "fp16 masters, fp32 moments": row(slow=True, adam=FP16_MASTERS, **TROUBLE),
    "fp16 masters, fp16 moments": row(slow=True, adam=FP16_MASTERS | FP16_MOMENTS, **TROUBLE),
    "adam": row(slow=True, **ADAM),
    "adam with trouble": row(**ADAM, **TROUBLE, found_inf_steps=frozenset({3, 6})),
    "adam in fp16 with loss scaling": row(slow=True, **ADAM, precision="fp16"),
    "adam with native fp32 parameters": row(slow=True, **ADAM, precision="fp32_params"),
    "adam of experts in two chunks": row(slow=True, **ADAM, experts=True, chunks=2),
    "adam with most parameters frozen": row(slow=True, **ADAM, frozen=True),
    "muon with trouble": row(**MUON, **TROUBLE),
    "muon of experts": row(slow=True, **MUON, experts=True),
    "muon with native fp32 parameters": row(slow=True, **MUON, precision="fp32_params"),
    "dist_muon with trouble": row(slow=True, **DIST_MUON, **TROUBLE),
    "dist_muon of experts": row(slow=True, **DIST_MUON, experts=True),
}
for _name, _config in {"all at once": PACKED, "all at once, masters whole": WHOLE}.items():
    ROWS[_name] = row(
        _config, slow=True, chunks=2, experts=True, found_inf_steps=frozenset({4}), rerun_steps=frozenset({5, 7}),
        grad_norm_skip_steps=frozenset({8}),
    )  # fmt: skip
for _strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
    for _kind, _options in {"dense": {}, "experts": {"experts": True}, "swiglu": {"swiglu": True}}.items():
        _slow = (_strategy, _kind) != ("optim_grads_params", "experts")
        ROWS[f"{_strategy} of {_kind}"] = row(slow=_slow, fsdp=_strategy, **_options, **TROUBLE_UNDER_FSDP)


@pytest.mark.parametrize("name", in_lanes(ROWS, [name for name, (*_, slow) in ROWS.items() if not slow]))
def test_8_steps_are_bitwise_equal_to_resident_with_every_state_off_in_forward_and_backward(name):
    config, options, _ = ROWS[name]
    expected, record, stats = same_steps(config, STEPS, **options)
    exits = {options["checkpoint_exit_step"]} if "checkpoint_exit_step" in options else set()
    assert len(record.steps) == stats.steps == max(exits or {STEPS})
    assert record.steps[-1].should_checkpoint == bool(exits)
    reruns, *skips = (options.get(f"{cause}_steps", set()) for cause in ("rerun", "found_inf", "grad_norm_skip"))
    skipped = {step.step for step in record.steps if step.skipped}
    assert {step.step for step in record.steps if step.passes == 2} == reruns | exits
    if options.get("precision") == "fp16":  # whose first steps overflow
        assert 1 in skipped and len(skipped) < STEPS
    else:
        assert skipped == exits.union(*skips)
    assert len({step.loss for step in record.steps if step.loss is not None}) > len(record.steps) // 2
    assert record.peak_forward_backward_bytes == 0 < expected.peak_forward_backward_bytes
    assert stats.released_bytes >= stats.state_bytes == stats.offloaded_bytes > 0


def test_installed_but_never_enabled_is_the_run_without_it():
    expected, end = resident(5, experts=True)
    with bridge_fgo.install(PACKED), training(False, experts=True) as run:
        assert steps(run, 5) == numbers(expected.steps)
        assert min(run.live_bytes) > 0
        assert bits(run) == end


# A share of the states.

SHARED = {"distributed": {}, **OPTIMIZERS, "fsdp": FSDP}
SHARES = [{"fraction": 0.5}, {"moments": False}, {"master_weights": False}, {"fraction": 0.25}]
IN_THE_FAST_LANE = [("distributed", 1), ("distributed", 2), ("adam", 0), ("dist_muon", 2)]


@pytest.mark.parametrize(
    ("name", "share"),
    in_lanes([(n, i) for n in SHARED for i in range(4 if n == "distributed" else 3)], IN_THE_FAST_LANE),
)
def test_a_share_of_the_states_is_bitwise_equal_and_keeps_the_rest(name, share):
    config = dataclasses.replace(WHOLE, **SHARES[share])
    _, record, stats = same_steps(config, STEPS if name == "distributed" else 5, **SHARED[name])
    assert SHARES[share].get("fraction", 0) * stats.state_bytes <= stats.offloaded_bytes < stats.state_bytes
    if name == "fsdp":  # whose storages have a padding
        assert 0 < record.peak_forward_backward_bytes <= record.state_bytes - stats.offloaded_bytes
    else:
        assert 0 < record.peak_forward_backward_bytes == stats.state_bytes - stats.offloaded_bytes


@pytest.mark.slow
@pytest.mark.parametrize("moment2", ["adamuon", "normuon"])
def test_adaptive_muon_offloads_a_second_moment_of_each_element_and_keeps_that_of_each_row(monkeypatch, moment2):
    from megatron.core.optimizer import emerging_optimizers

    # What emerging-optimizers 0.3 reads and the constructor of mcore 0.19's does not set.
    for name, value in (("scale_mode", "spectral"), ("extra_scale_factor", 1.0)):
        monkeypatch.setattr(emerging_optimizers.TensorParallelAdaptiveMuon, name, value, raising=False)
    options = {"distributed": False, "optimizer": "adaptive_muon", "moment2": moment2}
    expected, record, stats = same_steps(PACKED, 5, **options)
    assert record.peak_forward_backward_bytes == expected.state_bytes - stats.state_bytes < expected.state_bytes // 100
    assert stats.offloaded_bytes == stats.state_bytes
    assert (record.peak_forward_backward_bytes > 0) == (moment2 == "normuon")


@pytest.mark.parametrize("options", [ADAM, MUON])
def test_adam_has_12_bytes_a_parameter_and_muon_8(options):
    with training(True, **options) as run:
        steps(run)
        stats = bridge_fgo.stats()
        sizes = {}
        for leaf in run.optimizer.chained_optimizers:
            sizes[type(leaf.optimizer).__name__] = sum(param.numel() for param in leaf.get_parameters())
    muon = sizes.pop("TensorParallelMuon", 0)
    assert stats.state_bytes == 8 * muon + 12 * sum(sizes.values())
    assert (muon > 0) == (options is MUON)


# What moves, and in which order.


def test_a_second_pass_and_a_skipped_step_move_again_only_what_had_come_back():
    figures = []
    with training(True, rerun_steps=frozenset({3}), grad_norm_skip_steps=frozenset({4})) as run:
        for _ in range(6):
            steps(run)
            figures.append(bridge_fgo.stats())
    assert [s.passes for s in figures] == [1, 1, 2, 1, 1, 1]
    whole = figures[1].bytes_reloaded
    assert 0.84 < whole / figures[1].offloaded_bytes < 0.87  # of masters 17 bits of 32
    came_back = figures[3].bytes_reloaded  # before the skipped update: what the step would have begun with
    assert 0 < came_back < whole
    moved = [(s.bytes_offloaded, s.bytes_reloaded) for s in figures[1:]]
    left = whole - moved[0][0]  # to the next pass; the first step, which makes moments, leaves nothing
    assert 0 < left < whole
    assert moved == [
        (whole - left, whole), (whole + came_back, whole + came_back), (left, came_back),
        (came_back + whole - left, whole),
        (whole, whole),
    ]  # fmt: skip


@pytest.fixture
def copied(monkeypatch):
    """The number of parameter groups that each of Megatron-FSDP's copies to the weights goes through."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import ParamAndGradBuffer

    copied, copy = [], ParamAndGradBuffer.copy_main_weights_to_model_weights

    def counted(buffer):
        copied.append(len(buffer.parameter_groups))
        copy(buffer)

    # As of upstream's module: somebody's own would keep the step whole.
    counts = FunctionType(counted.__code__, vars(sys.modules[copy.__module__]), closure=counted.__closure__)
    monkeypatch.setattr(ParamAndGradBuffer, "copy_main_weights_to_model_weights", counts)
    return copied


def test_the_step_of_megatron_fsdp_goes_part_by_part_and_copies_each_part_to_the_weights(copied):
    with training(True, WHOLE, **FSDP) as run:
        steps(run)
        assert len(session_of(run).engine.schedule.parts) == 3
    assert copied == [1, 1, 1, 0], "each group once, and nothing is left"


def test_weights_of_megatron_fsdp_are_made_anew_part_by_part_also_where_a_hook_keeps_the_step_whole(copied):
    with training(True, WHOLE, **FSDP) as run:
        run.optimizer.optimizer.register_step_post_hook(lambda *of_a_step: None)
        steps(run)
        assert copied == [3]
        run.model[0].module.install_optimized_model_weights()
    assert copied == [3, 1, 1, 1, 0]


def test_masters_of_quantized_weights_stay_until_their_copy_which_is_one_for_all(monkeypatch):
    # As upstream's is: a collective over all groups.
    from bridge_fgo.states.fsdp import FsdpSource

    monkeypatch.setattr(FsdpSource, "writes_back_by_part", False)
    _, record, _ = same_steps(WHOLE, 4, **FSDP, layers=3)
    assert record.peak_forward_backward_bytes == 0


def updates(monkeypatch, landed, offload, config=WHOLE):
    """Train with what has landed as said; return the parameters of every step in the order of their updates."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    seen = []

    def number(muon, param, grad, **kwargs):
        return [id(each) for group in whole.param_groups for each in group["params"]].index(id(param))

    with monkeypatch.context() as patch, training(offload, config, **MUON) as run:
        muon = next(leaf.optimizer for leaf in run.optimizer.chained_optimizers if "Muon" in str(leaf.optimizer))
        # While a part is updated, the param groups of the optimizer itself have its parameters alone.
        whole = torch.optim.SGD([{"params": list(group["params"])} for group in muon.param_groups])
        note(patch, seen, TensorParallelMuon, "orthogonalize", number)
        if offload:
            parts = session_of(run).engine.schedule.parts
            numbers = {slab: number for number, part in enumerate(parts) for slab in part.slabs}
            patch.setattr(Schedule, "_has_landed", lambda schedule, slab: landed(numbers[slab]))
            for number, part in enumerate(parts):
                part.stays = number % 3 == 1
        run.train(3)
    return seen


@pytest.mark.parametrize("fraction", [pytest.param(1, marks=pytest.mark.slow), 0.7])
def test_the_order_of_muons_updates_is_that_of_its_parameters_whatever_stays_and_has_landed(monkeypatch, fraction):
    # With tensor parallelism each update may wait for the same update of other ranks.
    monkeypatch.setattr("bridge_fgo.memory.layout.LEAST_PART_BYTES", 2**17)
    expected = updates(monkeypatch, None, False)
    config = dataclasses.replace(WHOLE, fraction=fraction)
    for landed in (lambda number: True, lambda number: False, lambda number: number < 3):
        assert updates(monkeypatch, landed, True, config) == expected
    assert expected[: len(expected) // 3] == sorted(expected[: len(expected) // 3])
