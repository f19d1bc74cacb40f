"""The plan's layout and bytes under Megatron-FSDP against mcore's own, and against what is there in training."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import children
import pytest
import rank_child
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_fgo.bridge.refusals import STRATEGIES
from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.demo import missing_packages
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.job.tensors import Tensor
from bridge_fgo.tools.plan.fsdp_layout import groups_of, sharding_of
from bridge_fgo.tools.plan.fsdp_state import fsdp_weights

pytestmark = [
    pytest.mark.skipif(bool(missing_packages()), reason="compares with Megatron"),
    pytest.mark.usefixtures("cpu_standins"),
]

KINDS = {"dense": {}, "experts": {"experts": True}, "swiglu": {"swiglu": True}}


class Layer(torch.nn.Module):
    """Stands for a layer: Megatron-FSDP is told to gather its parameters together."""


SHAPES = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple)
TENSORS = st.lists(
    st.tuples(
        SHAPES,
        st.sampled_from([torch.bfloat16, torch.float32]),
        st.sampled_from([None, 0, 1]),
        st.booleans(),  # of an expert
        st.booleans(),  # trains
        st.integers(0, 9).map(lambda n: n == 0),  # a shared embedding
    ),
    min_size=1,
    max_size=14,
)


def model_of(tensors):
    """Return a model with these parameters, and what the plan is told of it."""
    model, layers, told = torch.nn.Module(), {None: torch.nn.Module(), 0: Layer(), 1: Layer()}, []
    for number, layer in layers.items():
        model.add_module(f"layer{number}", layer)
        layer.add_module("experts", torch.nn.Module())
    for number, (shape, dtype, unit, expert, trains, shared) in enumerate(tensors):
        param = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=trains)
        param.shared_embedding = shared
        owner = layers[unit].experts if expert else layers[unit]
        owner.register_parameter(f"p{number}", param)
    units = {f"layer{number}.": number for number in (0, 1)}
    for name, param in model.named_parameters():
        told.append(
            Tensor(
                name,
                param.numel(),
                param.dtype,
                own_bucket=param.shared_embedding,
                trainable=param.requires_grad,
                row=param.shape[1:].numel(),
                unit=next((number for layer, number in units.items() if name.startswith(layer)), None),
            )
        )
    return model, told


@settings(max_examples=150, deadline=None)
@given(TENSORS, st.sampled_from(STRATEGIES), st.sampled_from([1, 2, 3]), st.sampled_from([None, 1, 300]), st.booleans())
def test_layout_is_mcores(cpu_standins, tensors, strategy, ranks, bucket_size, overlaps):
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as module

    ddp = SimpleNamespace(
        data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlaps, bucket_size=bucket_size
    )
    model, told = model_of(tensors)
    parallel = Parallel(ranks, 1, 1, 1, 1, 1)
    ours = groups_of(told, True, ddp, parallel)
    theirs, *_ = module._get_parameter_groups(model, module.BucketingPolicy(bucket_size, [Layer], strategy), {})
    names = {param: name for name, param in model.named_parameters()}
    assert [[tensor.name for tensor in group.tensors] for group in ours] == [
        [names[param] for param in group.params] for group in theirs
    ]
    for group, other in zip(ours, theirs, strict=True):
        assert [told[place] for place in group.places] == group.tensors
        assert (group.row, group.expert) == (other.chunk_size_factor, other.is_expert_param)
        shapes = [param.shape for param in other.params]
        is_spread = sharding_of(ddp, parallel).states and ranks > 1
        for rank in range(ranks):
            items, bucket, shard = module.build_data_parallel_buffer_index(
                shapes, rank, ranks, is_spread, ddp, chunk_size_factor=other.chunk_size_factor
            )
            assert group.starts == [items[i].global_data_index for i in range(len(shapes))]
            assert group.numel(ranks) == bucket.size
            if not is_spread:
                continue
            buffer = SimpleNamespace(item_index_map=items, shard_bucket_index=shard, is_data_distributed=True)
            of = module.DataParallelBuffer
            slices = [of._get_item_slice_in_shard(buffer, i) for i in range(len(shapes))]
            buffer._get_item_slice_in_shard = lambda i, slices=slices: slices[i]
            places = [of._get_item_local_shard_index(buffer, i) for i in range(len(shapes))]
            assert [(start, start + numel) for _, start, numel in group.part(rank, ranks)] == [
                (start, end) for start, end in places if end > start
            ]


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        pytest.param(*case, marks=() if case == ("optim_grads_params", "experts") else pytest.mark.slow)
        for case in itertools.product(STRATEGIES, KINDS)
    ],
)
def test_the_plan_has_to_the_byte_what_a_training_has(strategy, kind):
    from fsdp_plans import planned_and_found

    import bridge_fgo
    from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining

    asked = CpuOptions(offload=True, fsdp=strategy, **KINDS[kind])
    with bridge_fgo.install(OffloadConfig(engine="native")), CpuTraining(asked) as run:
        run.step()
        run.step()
        planned, found, padding = planned_and_found(run)
    assert planned == found
    assert planned["offloaded"] > padding >= 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"fsdp": "no_shard"},
        {"fsdp": "optim"},
        {"fsdp": "optim_grads", "swiglu": True},
        {"fsdp": "optim_grads_params", "experts": True},
        {"fsdp": "optim_grads_params", "swiglu": True, "instances": 2},
        {"fsdp": "optim_grads_params", "swiglu": True, "instances": 2, "outer_sharding": "optim"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_the_plan_has_to_the_byte_what_each_of_two_ranks_has(tmp_path, changes):
    from fsdp_plans import train_and_plan

    seen = children.run_ranks(train_and_plan, rank_child.Job(tmp_path / "ranks", 2, True, None, 2, changes))
    for planned, found, padding in seen:
        assert planned == found and planned["offloaded"] > padding


def ddp(strategy, **more):
    """Return what Bridge's DistributedDataParallelConfig would say."""
    return SimpleNamespace(data_parallel_sharding_strategy=strategy, overlap_grad_reduce=False, **more)


LAYERS = [Tensor(f"{n}", 10_000, row=100, unit=n) for n in range(10)]
OUTSIDE = [Tensor("embedding", 50_000, row=100)]
ADAM = SimpleNamespace(use_precision_aware_optimizer=False)


def weights_of(config, gpus=8, instances=1):
    parallel = Parallel(gpus, 1, 1, 1, 1, 1, instances)
    groups = groups_of([*OUTSIDE, *LAYERS], True, config, parallel)
    return fsdp_weights([groups], ADAM, config, parallel, False)


@pytest.mark.parametrize(
    ("strategy", "parameters", "gradients", "masters"),
    [("no_shard", 1, 1, 1), ("optim", 1, 1, 8), ("optim_grads", 1, 8, 8), ("optim_grads_params", 8, 8, 8)],
)
def test_each_strategy_spreads_what_its_name_says(strategy, parameters, gradients, masters):
    found = weights_of(ddp(strategy))
    most, padded = 2 * 150_000, 2 * (50_400 + 10 * 10_400)  # whole rows on 8 ranks
    whole = most if strategy == "no_shard" else padded
    assert (found.parameters, found.gradients) == (whole // parameters, whole // gradients)
    stays = 2 * 50_400 if strategy == "optim_grads_params" else 0  # weights in no layer, once gathered
    assert found.in_step - stays == 2 * whole // masters, "fp32 gradients of the parts that a rank updates"


def test_instances_spread_states_among_them_where_the_outer_strategy_says_so():
    parallel = Parallel(8, 1, 1, 1, 1, 1, optimizer_instances=2)
    inner, outer = (
        sharding_of(ddp("optim_grads_params", outer_dp_sharding_strategy=outer), parallel)
        for outer in ("no_shard", "optim")
    )
    assert (inner.ranks(parallel, False), outer.ranks(parallel, False)) == (4, 8)
    assert [inner.index(parallel, rank, False) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [outer.index(parallel, rank, False) for rank in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_a_strategy_that_there_is_not_is_an_error_with_its_setting():
    with pytest.raises(ValueError, match=r"ddp\.data_parallel_sharding_strategy='zero3': use one of no_shard"):
        weights_of(ddp("zero3"))
