"""Which states there are, and how large, before the first step: for each Adam that mcore builds."""

import copy
from types import SimpleNamespace

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, step

from bridge_fgo.memory.state import State
from bridge_fgo.states.distributed import bundles, home_device, live_bytes


class FusedAdam(torch.optim.Optimizer):
    """The attributes of Transformer Engine's FusedAdam that the engine reads, and its lazy states."""

    def __init__(self, params, exp_avg_dtype, master_weights, store_param_remainders):
        super().__init__([{"params": params}], {})
        self.master_weights = master_weights
        self.store_param_remainders = store_param_remainders
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_dtype,
            "master_param": torch.float32,
        }

    def initialize(self):
        for param in self.param_groups[0]["params"]:
            remainders = self.store_param_remainders and param.dtype == torch.bfloat16
            state = self.state[param]
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros(param.shape, dtype=self.name_to_dtype_map[key])
            if self.master_weights:
                state["master_param"] = torch.zeros(param.shape, dtype=torch.int16 if remainders else torch.float32)


def precision_aware(exp_avg_dtype, store_param_remainders, master_weights=True):
    """Return a DistributedOptimizer whose params are shards of the DDP buffer, as with precision-aware Adam."""
    buffer = torch.zeros(300, dtype=torch.bfloat16)
    native = torch.zeros(50)
    params = [buffer[:100], buffer[100:], native]
    return SimpleNamespace(
        optimizer=FusedAdam(params, exp_avg_dtype, master_weights, store_param_remainders),
        shard_fp32_from_float16_groups=[[None, None]],
        buffers=[
            SimpleNamespace(param_data=buffer, grad_data=torch.zeros(300)),
            SimpleNamespace(param_data=native, grad_data=torch.zeros(50)),
        ],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("remainders", [True, False])
def test_sizes_of_precision_aware_adam_are_known_before_the_first_step(dtype, remainders):
    optimizer = precision_aware(dtype, remainders)
    moments = 2 * dtype.itemsize * 350
    masters = (2 if remainders else 4) * 300 + 4 * 50
    assert sum(bundle.nbytes for bundle in bundles(optimizer)) == moments + masters
    assert not optimizer.optimizer.state, "asking must not make entries"
    optimizer.optimizer.initialize()
    assert live_bytes(bundles(optimizer), home_device(optimizer)) == moments + masters


def test_precision_aware_adam_without_masters_has_only_moments_to_move():
    # Its parameters are views of the DDP buffer: the model's own weights.
    optimizer = precision_aware(torch.float32, False, master_weights=False)
    assert {state.name for bundle in bundles(optimizer) for state in bundle.states} == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_precision_aware_adam_keeps_is_made_by_the_first_step_and_the_source_writes_none_of_it_back(dtype):
    # TE writes the weights itself; a reader gets fp32 of what is in 16 bits.
    states = [state for bundle in bundles(precision_aware(dtype, True)) for state in bundle.states]
    assert all(state.late and not state.written_back and state.rounds_to is None for state in states)
    half = {state.name for state in states if state.converts}
    assert half == (set() if dtype == torch.float32 else {"exp_avg", "exp_avg_sq"})


def test_masters_that_share_memory_with_a_ddp_buffer_are_left_alone():
    optimizer = make_distributed_optimizer([10, 20])
    masters = optimizer.shard_fp32_from_float16_groups[0]
    optimizer.buffers[0].param_data = masters[1]
    names = {id(b.param): [state.name for state in b.states] for b in bundles(optimizer)}
    assert names[id(masters[0])] == ["master weight", "exp_avg", "exp_avg_sq"]
    assert names[id(masters[1])] == ["exp_avg", "exp_avg_sq"]


def test_parameters_of_no_elements_have_no_states():
    optimizer = make_distributed_optimizer([10, 0, 20])
    assert [bundle.param.numel() for bundle in bundles(optimizer)] == [10, 20]


def test_scalar_steps_of_torchs_adam_are_no_states_to_move():
    optimizer = make_distributed_optimizer([10])
    step(optimizer, 0)
    names = {state.name for bundle in bundles(optimizer) for state in bundle.states}
    assert names == {"master weight", "exp_avg", "exp_avg_sq"}


def test_a_master_is_the_parameter_itself_and_a_moment_what_the_adam_holds_when_it_is_read():
    optimizer = make_distributed_optimizer([10])
    (bundle,) = bundles(optimizer)
    master, *moments = bundle.states
    assert master.read() is bundle.param
    assert [moment.read() for moment in moments] == [None, None]
    assert (master.late, master.written_back) == (False, True)
    assert all(moment.late and not moment.written_back for moment in moments)
    step(optimizer, 0)
    of_param = optimizer.optimizer.state[bundle.param]
    assert moments[0].read() is of_param["exp_avg"] and moments[1].read() is of_param["exp_avg_sq"]
    optimizer.optimizer.load_state_dict(copy.deepcopy(optimizer.optimizer.state_dict()))  # another dictionary
    loaded = optimizer.optimizer.state[bundle.param]
    assert moments[0].read() is loaded["exp_avg"] is not of_param["exp_avg"]


def moment(dtype):
    return State("moment", "exp_avg", torch.zeros(10), dtype, lambda: None, late=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_a_checkpoint_gets_moments_of_any_dtype_as_fp32(dtype):
    assert moment(dtype).saved_nbytes == 40


@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16])
def test_a_state_that_is_larger_or_smaller_than_was_planned_is_refused(other):
    with pytest.raises(RuntimeError, match="planned were 40"):
        moment(torch.float32).check_size(torch.zeros(10, dtype=other))


def test_a_master_in_the_gradient_buffer_is_left_alone():
    optimizer = make_distributed_optimizer([10, 20])
    masters = optimizer.shard_fp32_from_float16_groups[0]
    optimizer.buffers[0].grad_data = masters[1]
    kinds = {id(bundle.param): [state.kind for state in bundle.states] for bundle in bundles(optimizer)}
    assert kinds[id(masters[0])] == ["master", "moment", "moment"]
    assert kinds[id(masters[1])] == ["moment", "moment"]
