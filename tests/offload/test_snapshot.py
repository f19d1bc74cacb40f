"""What a checkpoint is given: right bytes, memory of its own, and no slab moved that need not be."""

from types import SimpleNamespace

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, step

from bridge_fgo.bridge import state_wrappers
from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.engine import ATTACHED, Attachment
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.memory.slab import SlabState
from bridge_fgo.memory.transfers import HostTransfers
from bridge_fgo.offload import snapshot
from bridge_fgo.states.distributed import MegatronSource

SIZES = [300_000, 1000, 500_000, 64, 700_000, 128]


def made(dtype=torch.float32, **settings):
    """Return an optimizer whose states are all released, the engine, its source, and the states before."""
    optimizer = make_distributed_optimizer(SIZES)
    if dtype != torch.float32:  # TE keeps moments in 16 bits beside fp32 masters; torch's Adam has one dtype
        for group in optimizer.optimizer.param_groups:
            for param in group["params"]:
                param.data = param.data.to(dtype)
        # By these it is TE's Adam with masters of its own, whose moments mcore reads as fp32.
        optimizer.optimizer.master_weights = True
        optimizer.optimizer.name_to_dtype_map = {"exp_avg": dtype, "exp_avg_sq": dtype, "master_param": torch.float32}
    source = MegatronSource(optimizer)
    config = OffloadConfig(engine="native", slab_bytes=2**20, **settings)
    engine = NativeEngine([source], config, PeakMeter(), transfers=HostTransfers(2**16))
    step(optimizer, 1)
    before = {id(param): states(optimizer, param) for param in params(optimizer)}
    engine.begin_pass()
    engine.release()
    return optimizer, engine, source, before


def residencies(engine):
    return {slab.state for slab in engine.slabs}


def params(optimizer):
    return [param for group in optimizer.optimizer.param_groups for param in group["params"]]


def states(optimizer, param):
    state = optimizer.optimizer.state[param]
    return {name: tensor.clone() for name, tensor in {"param": param, **state}.items()}


def read_as_it_is(optimizer, param):
    return lambda: {"param": param, **optimizer.optimizer.state[param]}


@pytest.mark.parametrize("copies", [True, False])
def test_released_states_are_handed_out_from_the_host_and_stay_there(copies):
    optimizer, engine, source, before = made()
    moved = engine.traffic.back
    with engine.saving(source, copies):
        for param in params(optimizer):
            handed = engine.hand_out(source, param, read_as_it_is(optimizer, param))
            assert handed.keys() == before[id(param)].keys()
            assert all(torch.equal(handed[name], value) for name, value in before[id(param)].items())
    assert engine.traffic.back == moved
    assert residencies(engine) == {SlabState.RELEASED}


def test_copies_share_no_memory_with_a_host_buffer_and_views_do():
    optimizer, engine, source, _ = made()
    buffers = {slab.host.tensor.untyped_storage().data_ptr() for slab in engine.slabs}
    for copies in (True, False):
        with engine.saving(source, copies):
            param = params(optimizer)[0]
            handed = engine.hand_out(source, param, read_as_it_is(optimizer, param))
            shared = handed["param"].untyped_storage().data_ptr() in buffers
        assert shared is not copies


def test_states_that_are_read_in_another_dtype_come_back_a_few_parts_at_a_time(monkeypatch):
    monkeypatch.setattr(snapshot.Snapshot, "most_borrowed", 1)
    optimizer, engine, source, before = made(torch.bfloat16)
    most = 0

    def read(param):
        nonlocal most
        state = optimizer.optimizer.state[param]
        present = [slab.gpu_bytes > 0 for slab in engine.slabs]
        most = max(most, sum(present))
        return {"param": param, **{name: state[name].float() for name in ("exp_avg", "exp_avg_sq")}}

    with engine.saving(source, copies=True):
        for param in params(optimizer):
            handed = engine.hand_out(source, param, lambda param=param: read(param))
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(handed[name], before[id(param)][name].float())
    assert 0 < most < len(engine.slabs) // 2
    assert residencies(engine) == {SlabState.RELEASED}
    engine.require_readable()
    for param in params(optimizer):
        now = states(optimizer, param)
        assert all(torch.equal(now[name], value) for name, value in before[id(param)].items())


def test_what_interrupts_a_save_comes_out_and_the_rest_of_what_was_borrowed_goes_back(monkeypatch):
    optimizer, engine, source, _ = made(torch.bfloat16)
    borrowed = []

    def copy_in(transfers, slab):
        borrowed.append(slab)
        if len(borrowed) == 3:
            raise KeyboardInterrupt
        copies(transfers, slab)

    copies = HostTransfers.copy_in
    monkeypatch.setattr(HostTransfers, "copy_in", copy_in)
    with pytest.raises(KeyboardInterrupt), engine.saving(source, copies=True):
        for param in params(optimizer):
            engine.hand_out(source, param, read_as_it_is(optimizer, param))
    assert len(borrowed) == 3
    assert [slab.interrupted for slab in engine.slabs if slab in borrowed] == ["", "", "KeyboardInterrupt"]
    assert all(slab.state is SlabState.RELEASED for slab in engine.slabs if slab is not borrowed[2])


def test_what_is_not_offloaded_is_handed_out_as_it_is():
    optimizer, engine, source, _ = made(fraction=0.2)
    left = [
        param
        for param in params(optimizer)
        if not any(param is p for part in engine.parts_of(source) for p in part.params)
    ]
    assert left
    with engine.saving(source, copies=True):
        handed = engine.hand_out(source, left[0], read_as_it_is(optimizer, left[0]))
    assert handed["param"] is left[0]


def test_a_resident_state_is_copied_as_the_next_step_would_change_it():
    optimizer, engine, source, before = made()
    engine.require_writable()
    param = params(optimizer)[0]
    with engine.saving(source, copies=True):
        handed = engine.hand_out(source, param, read_as_it_is(optimizer, param))
    step(optimizer, 2)
    assert torch.equal(handed["exp_avg"], before[id(param)]["exp_avg"])


def test_a_checkpoints_state_dict_does_not_have_te_read_states_that_mcore_drops():
    optimizer, engine, source, _ = made()
    param = params(optimizer)[0]

    class Adam:
        state = optimizer.optimizer.state

        def get_unscaled_state(self, param, name):
            return self.state[param][name].float() + 1  # reads: of released memory

    distributed = SimpleNamespace(optimizer=Adam(), **{ATTACHED: Attachment(engine, source)})

    def state_dict():
        return distributed.optimizer.get_unscaled_state(param, "exp_avg")

    with engine.saving(source, copies=True):
        assert (
            state_wrappers.reads_no_states(state_dict, distributed, (), {})
            is optimizer.optimizer.state[param]["exp_avg"]
        )
    assert "get_unscaled_state" not in vars(distributed.optimizer)
    assert residencies(engine) == {SlabState.RELEASED}
    state_wrappers.reads_no_states(state_dict, distributed, (), {})
    assert residencies(engine) == {SlabState.RESIDENT}


def test_a_state_that_somebody_replaced_while_its_slab_was_away_is_saved_as_it_is():
    optimizer, engine, source, _ = made()
    param = params(optimizer)[0]
    new = torch.full_like(optimizer.optimizer.state[param]["exp_avg"], 3.0)
    optimizer.optimizer.state[param]["exp_avg"] = new
    with engine.saving(source, copies=True):
        handed = engine.hand_out(source, param, read_as_it_is(optimizer, param))
    assert torch.equal(handed["exp_avg"], new)
    assert handed["exp_avg"].data_ptr() != new.data_ptr()


def test_a_save_of_one_source_leaves_those_of_others_where_they_are():
    optimizers = [make_distributed_optimizer(SIZES, seed=i) for i in range(2)]
    sources = [MegatronSource(optimizer) for optimizer in optimizers]
    engine = NativeEngine(sources, OffloadConfig(engine="native"), PeakMeter(), transfers=HostTransfers(2**16))
    for optimizer in optimizers:
        step(optimizer, 1)
    before = states(optimizers[1], params(optimizers[1])[0])
    engine.begin_pass()
    engine.release()
    saved, other = sources
    with engine.saving(saved, copies=True):
        assert engine.is_checkpointing(saved) and not engine.is_checkpointing(other)
        param = params(optimizers[0])[0]
        engine.hand_out(saved, param, read_as_it_is(optimizers[0], param))
        assert residencies(engine) == {SlabState.RELEASED}
        param = params(optimizers[1])[0]
        handed = engine.hand_out(other, param, read_as_it_is(optimizers[1], param))
        assert handed["param"] is param, "a reader gets the states themselves, on the GPU"
        assert all(torch.equal(handed[name], value) for name, value in before.items())
        assert all(slab.state is SlabState.RELEASED for part in engine.parts_of(saved) for slab in part.slabs)
    assert not engine.is_checkpointing(saved)
