"""What a DistributedOptimizer claims as a source: its states, its step part by part, and its copy to the weights."""

import copy
from types import SimpleNamespace

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, step, with_model
from fake_training import masters_of, weights_of
from fused_adam import PrecisionAwareAdam

from bridge_fgo.memory.state_tensor import State
from bridge_fgo.states.distributed import MegatronSource, bundles, home_device, live_bytes

SIZES = [100, 64, 300, 8, 50]
QUANTIZED = [
    ("ddp_config", "fp8_param_gather"),
    ("ddp_config", "fp4_param_gather"),
    ("config", "reuse_grad_buf_for_mxfp8_param_ag"),
]


def made(fp32_views=0, seed=0):
    """Return a DistributedOptimizer with gradients and a model, and its source."""
    optimizer = with_model(make_distributed_optimizer(SIZES, fp32_views=fp32_views))
    generator = torch.Generator().manual_seed(seed)
    for param in optimizer.optimizer.param_groups[0]["params"]:
        param.grad = torch.randn(param.shape, generator=generator)
    return optimizer, MegatronSource(optimizer)


def names_of(optimizer):
    return {id(bundle.param): [state.name for state in bundle.states] for bundle in bundles(optimizer)}


# Its states and masters.


def test_masters_name_the_weights_they_are_rounded_to_and_moments_are_read_from_the_adam():
    optimizer, source = made(fp32_views=1)
    assert source.device == optimizer.buffers[0].grad_data.device
    found = source.states()
    native, *params = optimizer.optimizer.param_groups[0]["params"]
    assert found[0].param is native and [state.kind for state in found[0].states] == ["moment", "moment"]
    for bundle, param, weight in zip(found[1:], params, weights_of(optimizer), strict=True):
        master, *moments = bundle.states
        assert master.read() is param is bundle.param
        assert master.written_back and not master.late and torch.equal(master.rounds_to.tensor(), weight)
        assert master.rounds_to.tensor().data_ptr() == weight.data_ptr()
        for moment in moments:
            assert moment.late and not moment.written_back and moment.rounds_to is moment.read() is None

    optimizer = make_distributed_optimizer([10, 0])
    (bundle,) = bundles(optimizer)  # a parameter of no elements has none
    for _ in range(2):
        step(optimizer, 0)
        of_param = optimizer.optimizer.state[bundle.param]
        expected = [bundle.param, of_param["exp_avg"], of_param["exp_avg_sq"]]
        assert all(state.read() is tensor for state, tensor in zip(bundle.states, expected, strict=True))
        optimizer.optimizer.load_state_dict(copy.deepcopy(optimizer.optimizer.state_dict()))  # another dictionary


def test_a_master_that_is_another_tensor_in_the_next_step_is_copied_to_its_weights():
    optimizer, _ = made()
    copies = MegatronSource(optimizer)
    for value in (1.0, 2.0):
        masters_of(optimizer)[0] = new = torch.full_like(masters_of(optimizer)[0], value)
        with copies.one_step():
            copies.copy_part(frozenset({id(new)}))
        assert (weights_of(optimizer)[0] == value).all()


@pytest.mark.parametrize("buffer", ["param_data", "grad_data"])
def test_masters_that_share_memory_with_a_ddp_buffer_are_left_alone(buffer):
    optimizer = make_distributed_optimizer([10, 20])
    first, second = masters_of(optimizer)
    setattr(optimizer.buffers[0], buffer, second)
    names = names_of(optimizer)
    assert names[id(first)] == ["master weight", "exp_avg", "exp_avg_sq"]
    assert names[id(second)] == ["exp_avg", "exp_avg_sq"]


def precision_aware(exp_avg_dtype, store_param_remainders, master_weights=True):
    """Return a DistributedOptimizer whose params are shards of the DDP buffer, as with precision-aware Adam."""
    buffer, native = torch.zeros(300, dtype=torch.bfloat16), torch.zeros(50)
    params = [buffer[:100], buffer[100:], native]
    moments = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), exp_avg_dtype)
    return SimpleNamespace(
        optimizer=PrecisionAwareAdam(params, master_weights, False, store_param_remainders, **moments),
        shard_fp32_from_float16_groups=[[None, None]],
        buffers=[
            SimpleNamespace(param_data=buffer, grad_data=torch.zeros(300)),
            SimpleNamespace(param_data=native, grad_data=torch.zeros(50)),
        ],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("remainders", [True, False])
def test_what_precision_aware_adam_keeps_is_known_before_the_first_step_and_not_written_back(dtype, remainders):
    # TE writes the weights itself; a reader gets fp32 of what is in 16 bits.
    optimizer = precision_aware(dtype, remainders)
    nbytes = 2 * dtype.itemsize * 350 + (2 if remainders else 4) * 300 + 4 * 50
    assert sum(bundle.nbytes for bundle in bundles(optimizer)) == nbytes
    states = [state for bundle in bundles(optimizer) for state in bundle.states]
    assert all(state.late and not state.written_back and state.rounds_to is None for state in states)
    half = {state.name for state in states if state.converts}
    assert half == (set() if dtype == torch.float32 else {"exp_avg", "exp_avg_sq"})
    assert not optimizer.optimizer.state, "asking must not make entries"
    for param in optimizer.optimizer.param_groups[0]["params"]:
        optimizer.optimizer.initialize_state(param)
    assert live_bytes(bundles(optimizer), home_device(optimizer)) == nbytes


def test_precision_aware_adam_without_masters_has_only_moments_to_move():
    # Its parameters are views of the DDP buffer: the model's own weights.
    names = names_of(precision_aware(torch.float32, False, master_weights=False)).values()
    assert all(of_param == ["exp_avg", "exp_avg_sq"] for of_param in names)


def moment(dtype):
    return State("moment", "exp_avg", torch.zeros(10), dtype, lambda: None, late=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_a_checkpoint_gets_moments_of_any_dtype_as_fp32(dtype):
    assert moment(dtype).saved_nbytes == 40


@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16])
def test_a_state_that_is_larger_or_smaller_than_was_planned_is_refused(other):
    with pytest.raises(RuntimeError, match="planned were 40"):
        moment(torch.float32).check_size(torch.zeros(10, dtype=other))


# Its step, and its copy to the model.


def with_native_weight(optimizer):
    """Give it an fp32 parameter of the model's, which its copy to the model takes too."""
    shard, model = torch.full((4,), 7.0), torch.zeros(4)
    optimizer.shard_fp32_groups, optimizer.model_fp32_groups = [[shard]], [[model]]
    masters_only = optimizer._copy_main_params_to_model_params

    def copy_all():
        masters_only()
        for shards, models in zip(optimizer.shard_fp32_groups, optimizer.model_fp32_groups, strict=True):
            for one, of_model in zip(shards, models, strict=True):
                of_model.copy_(one)
                optimizer.copied.append(id(one))

    optimizer._copy_main_params_to_model_params = copy_all
    return shard, model


class FakePart:
    """What a source sees of a part: whose states, and whether they are copied to the model."""

    def __init__(self, params, written_back=True):
        self.ids, self.written_back, self.noted = frozenset(map(id, params)), written_back, 0

    def mark_just_rounded(self):
        self.noted += 1


def copied_by_all(optimizer, source):
    """Return the `id`s that a copy of all masters copies."""
    optimizer.copied.clear()
    with source.writing_back():
        optimizer._copy_main_params_to_model_params()
    return optimizer.copied


@pytest.mark.parametrize("what", ["of no part", "without masters", *QUANTIZED])
def test_what_is_not_copied_by_part_is_updated_and_left_for_the_copy_of_all(what):
    optimizer, source = made()
    assert source.writes_back_by_part
    masters = masters_of(optimizer)
    old, weights = masters[0].clone(), [weight.clone() for weight in weights_of(optimizer)]
    part = FakePart(masters, written_back=what != "without masters")
    if what in QUANTIZED:
        where, name = what
        setattr(optimizer, where, SimpleNamespace(**{name: True}))
        assert not source.writes_back_by_part
        assert all(state.rounds_to is None for bundle in source.states() for state in bundle.states)
    owner = None if what == "of no part" else part
    with source.stepping(lambda: source.step(owner), {} if owner is None else dict.fromkeys(part.ids, part)):
        optimizer.optimizer.step()
        assert (optimizer.copied, part.noted) == ([], 0)
        assert not torch.equal(masters[0], old)
        assert all(torch.equal(a, b) for a, b in zip(weights_of(optimizer), weights, strict=True))
        assert copied_by_all(optimizer, source) == list(map(id, masters))


def test_the_last_copy_takes_what_was_not_copied_part_by_part_and_outside_of_a_step_all():
    optimizer, source = made()
    native, of_model = with_native_weight(optimizer)
    masters = masters_of(optimizer)
    lists = dict(vars(optimizer))

    def run():
        source.step(None)
        source.step(FakePart(masters[:2]))
        assert sorted(optimizer.copied) == sorted(map(id, masters[:2]))
        assert not of_model.any(), "native fp32 parameters are no masters"

    with source.stepping(run, {id(m): None for m in masters}):
        optimizer.optimizer.step()
        assert copied_by_all(optimizer, source) == [*(id(m) for m in masters[2:]), id(native)]
    assert torch.equal(of_model, native)
    assert {name: vars(optimizer)[name] for name in lists} == lists, "its own lists are back"
    assert copied_by_all(optimizer, source) == [*map(id, masters), id(native)]


# The weights that masters are rounded to.


@pytest.mark.parametrize("other", [lambda master: None, torch.Tensor.double], ids=["none", "fp64"])
def test_only_an_fp32_master_is_rounded_to_a_weight(other):
    optimizer = with_model(make_distributed_optimizer([10, 20]))
    masters = masters_of(optimizer)
    masters[0] = other(masters[0])  # none: of a precision-aware Adam
    assert set(MegatronSource(optimizer).rounded_weights()) == {id(masters[1])}


def test_a_weight_is_found_where_its_buffer_is_now():
    optimizer = with_model(make_distributed_optimizer([10, 20]))
    masters, bucket = masters_of(optimizer), optimizer.buffers[-1].buckets[0]
    shards = MegatronSource(optimizer).rounded_weights()
    first, second = (shards[id(master)] for master in masters)
    assert first.buffer is second.buffer, "one callable for each buffer"
    for _ in range(2):
        start = bucket.param_data.data_ptr()
        assert [shard.tensor().data_ptr() for shard in (first, second)] == [start, start + 20]
        assert torch.equal(second.tensor(), masters[1].bfloat16())
        bucket.param_data = bucket.param_data.clone()


# mcore's own offloaders.

UPSTREAM = ["_state_offloader", "_optimizer_state_offloader"]


@pytest.mark.parametrize("name", UPSTREAM)
def test_an_offloader_of_mcores_own_is_found_and_dropped(name):
    optimizer, source = made()
    assert source.upstream_offloader() is None
    setattr(optimizer, name, offloader := object())
    assert source.upstream_offloader() is offloader
    source.drop_other_offloader()
    assert getattr(optimizer, name) is None
    assert source.upstream_offloader() is None
    other = next(each for each in UPSTREAM if each != name)
    assert not hasattr(optimizer, other), "mcore asks for what its generation has"


def test_an_attribute_of_the_class_is_no_offloader_of_the_optimizers():
    class Distributed(SimpleNamespace):
        _state_offloader = property(lambda self: 1 / 0)

    optimizer = Distributed(**vars(made()[0]))
    source = MegatronSource(optimizer)
    source.drop_other_offloader()
    assert source.upstream_offloader() is None
