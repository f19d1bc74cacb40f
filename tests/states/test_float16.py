"""What mcore's Float16OptimizerWithFloat16Params claims as a source of states."""

import pytest
import torch

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.offload.profile import Mark
from bridge_fgo.states.float16 import Float16Source

pytestmark = pytest.mark.usefixtures("cpu_standins")


def made(weights, inner=torch.optim.AdamW, **settings):
    """Return mcore's optimizer over weights, with masters of those in 16 bits."""
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    group = {"params": [torch.nn.Parameter(weight) for weight in weights]}
    config = OptimizerConfig(optimizer="adam", bf16=True, lr=1e-2)
    return Float16OptimizerWithFloat16Params(inner([group], **settings), config, None, lambda *of_state: None)


def muon(**settings):
    from megatron.core.optimizer import emerging_optimizers

    kind = "TensorParallelAdaptiveMuon" if settings else "TensorParallelMuon"
    return made([torch.randn(4, 8).bfloat16()], getattr(emerging_optimizers, kind), **settings)


def states(optimizer):
    return [state for bundle in Float16Source(optimizer).states() for state in bundle.states]


def test_adam_has_a_master_of_each_16_bit_weight_whose_bits_a_weight_in_another_order_does_not_tell():
    optimizer = made([torch.randn(3, 5).bfloat16(), torch.randn(7), torch.randn(0).bfloat16()])
    found = [(state.name, state.nbytes, state.written_back) for state in states(optimizer)]
    moments = [[(name, 4 * size, False) for name in ("exp_avg", "exp_avg_sq")] for size in (15, 7)]
    assert found == [("master weight", 60, True), *moments[0], *moments[1]]
    optimizer = made([torch.randn(4, 8).bfloat16(), torch.randn(8, 4).bfloat16().t()])
    first, second = (state for state in states(optimizer) if state.kind == "master")
    assert torch.equal(first.rounds_to.tensor(), optimizer.float16_groups[0][0].detach().view(-1))
    assert second.rounds_to is None


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ["momentum_buffer"]),
        ({"moment2_method": "adamuon"}, ["momentum_buffer", "moment2_buffer"]),
        ({"moment2_method": "normuon"}, ["momentum_buffer"]),
    ],
)
def test_muon_has_momenta_of_its_parameters_shape_which_are_made_as_mcore_makes_them(settings, names):
    optimizer = muon(**settings)
    _, *moments = states(optimizer)
    assert [state.name for state in moments] == names
    assert all(state.late and state.read() is None for state in moments)
    moments[0].make()
    (param,) = optimizer.get_parameters()
    assert set(optimizer.optimizer.state[param]) == {"momentum_buffer", "moment2_buffer"} - (
        {"moment2_buffer"} if not settings else set()
    )
    assert all(state.read().nbytes == state.nbytes == 128 for state in moments)


def test_updates_keep_their_order_only_where_ranks_may_wait_for_each_other():
    assert Float16Source(muon()).keeps_order
    assert not Float16Source(made([torch.randn(4).bfloat16()])).keeps_order


@pytest.mark.parametrize("is_stub", [False, True])
def test_a_rank_with_nothing_to_update_has_a_device_and_an_engine(is_stub):
    optimizer = made([torch.randn(4).bfloat16()])
    # As mcore's LayerWiseDistributedOptimizer leaves it where all parameters fall to other ranks.
    for groups in (optimizer.optimizer.param_groups[0]["params"], optimizer.float16_groups[0]):
        groups.clear()
    optimizer.fp32_from_float16_groups[0].clear()
    source = Float16Source(optimizer)
    assert source.device == torch.device("cpu")
    engine = NativeEngine([] if is_stub else [source], OffloadConfig(engine="native"), PeakMeter())
    assert (engine.state_bytes, engine.slabs) == (0, [])
    with engine.training_step(1):
        engine.begin_pass()
        engine.release()
        engine.point(Mark(0, 0, 0))
        engine.reload()
        engine.updating()
        for each in engine.sources:
            with engine.stepping(each):
                pass
        engine.settle()
    engine.end_step(updated=True)
    engine.offload_now()
    engine.require_writable()
    assert (engine.pinned_bytes, engine.existing_bytes(), engine.is_lost) == (0, 0, False)
    engine.close()
