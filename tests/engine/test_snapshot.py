"""What a checkpoint is given: right bytes, memory of its own, and no slab moved that need not be."""

from types import SimpleNamespace

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, step

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engine import snapshot
from bridge_fgo.engine.native import NativeOffloader
from bridge_fgo.engine.peaks import PeakMeter
from bridge_fgo.engine.residency import Residency
from bridge_fgo.engine.schedule import Schedule
from bridge_fgo.engine.transfers import HostTransfers
from bridge_fgo.wiring import wrappers
from bridge_fgo.wiring.session import OFFLOADER

SIZES = [300_000, 1000, 500_000, 64, 700_000, 128]


def made(dtype=torch.float32, **settings):
    """An optimizer whose states are all released, its offloader, and the states' bytes before."""
    optimizer = make_distributed_optimizer(SIZES)
    if dtype != torch.float32:  # TE keeps moments in 16 bits beside fp32 masters; torch's Adam has one dtype
        for group in optimizer.optimizer.param_groups:
            for param in group["params"]:
                param.data = param.data.to(dtype)
    offloader = NativeOffloader(
        optimizer,
        OffloadConfig(engine="native", slab_bytes=2**20, **settings),
        Schedule(HostTransfers(2**16), PeakMeter()),
    )
    step(optimizer, 1)
    before = {id(param): states(optimizer, param) for param in params(optimizer)}
    offloader.offload()
    offloader.release()
    return optimizer, offloader, before


def params(optimizer):
    return [param for group in optimizer.optimizer.param_groups for param in group["params"]]


def states(optimizer, param):
    state = optimizer.optimizer.state[param]
    return {name: tensor.clone() for name, tensor in {"param": param, **state}.items()}


def read_as_it_is(optimizer, param):
    return lambda: {"param": param, **optimizer.optimizer.state[param]}


@pytest.mark.parametrize("copies", [True, False])
def test_released_states_are_handed_out_from_the_host_and_stay_there(copies):
    optimizer, offloader, before = made()
    moved = offloader.bytes_in
    with offloader.saving(copies):
        for param in params(optimizer):
            handed = offloader.hand_out(param, read_as_it_is(optimizer, param))
            assert handed.keys() == before[id(param)].keys()
            assert all(torch.equal(handed[name], value) for name, value in before[id(param)].items())
    assert offloader.bytes_in == moved
    assert set(offloader.residencies) == {Residency.RELEASED}


def test_copies_share_no_memory_with_a_host_buffer_and_views_do():
    optimizer, offloader, _ = made()
    buffers = {slab.host.tensor.untyped_storage().data_ptr() for slab in offloader.slabs}
    for copies in (True, False):
        with offloader.saving(copies):
            param = params(optimizer)[0]
            handed = offloader.hand_out(param, read_as_it_is(optimizer, param))
            shared = handed["param"].untyped_storage().data_ptr() in buffers
        assert shared is not copies


def test_states_that_are_read_in_another_dtype_come_back_a_few_parts_at_a_time(monkeypatch):
    monkeypatch.setattr(snapshot, "MOST_BORROWED", 1)
    optimizer, offloader, before = made(torch.bfloat16)
    most = 0

    def read(param):
        nonlocal most
        state = optimizer.optimizer.state[param]
        present = [slab.gpu_bytes > 0 for slab in offloader.slabs]
        most = max(most, sum(present))
        return {"param": param, **{name: state[name].float() for name in ("exp_avg", "exp_avg_sq")}}

    with offloader.saving(copies=True):
        for param in params(optimizer):
            handed = offloader.hand_out(param, lambda param=param: read(param))
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(handed[name], before[id(param)][name].float())
    assert 0 < most < len(offloader.slabs) // 2
    assert set(offloader.residencies) == {Residency.RELEASED}
    offloader.require_readable()
    for param in params(optimizer):
        now = states(optimizer, param)
        assert all(torch.equal(now[name], value) for name, value in before[id(param)].items())


def test_what_interrupts_a_save_comes_out_and_the_rest_of_what_was_borrowed_goes_back(monkeypatch):
    optimizer, offloader, _ = made(torch.bfloat16)
    borrowed = []

    def copy_in(transfers, slab):
        borrowed.append(slab)
        if len(borrowed) == 3:
            raise KeyboardInterrupt
        copies(transfers, slab)

    copies = HostTransfers.copy_in
    monkeypatch.setattr(HostTransfers, "copy_in", copy_in)
    with pytest.raises(KeyboardInterrupt), offloader.saving(copies=True):
        for param in params(optimizer):
            offloader.hand_out(param, read_as_it_is(optimizer, param))
    assert len(borrowed) == 3
    assert [slab.tracker.interrupted for slab in offloader._slabs if slab.slab in borrowed] == [
        "",
        "",
        "KeyboardInterrupt",
    ]
    assert all(slab.tracker.state is Residency.RELEASED for slab in offloader._slabs if slab.slab is not borrowed[2])


def test_what_is_not_offloaded_is_handed_out_as_it_is():
    optimizer, offloader, _ = made(fraction=0.2)
    left = [
        param for param in params(optimizer) if not any(param is p for part in offloader.parts for p in part.params)
    ]
    assert left
    with offloader.saving(copies=True):
        handed = offloader.hand_out(left[0], read_as_it_is(optimizer, left[0]))
    assert handed["param"] is left[0]


def test_a_resident_state_is_copied_as_the_next_step_would_change_it():
    optimizer, offloader, before = made()
    offloader.require_writable()
    param = params(optimizer)[0]
    with offloader.saving(copies=True):
        handed = offloader.hand_out(param, read_as_it_is(optimizer, param))
    step(optimizer, 2)
    assert torch.equal(handed["exp_avg"], before[id(param)]["exp_avg"])


def test_a_checkpoints_state_dict_does_not_have_te_read_states_that_mcore_drops():
    optimizer, offloader, _ = made()
    param = params(optimizer)[0]

    class Adam:
        state = optimizer.optimizer.state

        def get_unscaled_state(self, param, name):
            return self.state[param][name].float() + 1  # reads: of released memory

    distributed = SimpleNamespace(optimizer=Adam(), **{OFFLOADER: offloader})

    def state_dict():
        return distributed.optimizer.get_unscaled_state(param, "exp_avg")

    with offloader.saving(copies=True):
        assert wrappers.reads_no_states(state_dict, distributed, (), {}) is optimizer.optimizer.state[param]["exp_avg"]
    assert "get_unscaled_state" not in vars(distributed.optimizer)
    assert set(offloader.residencies) == {Residency.RELEASED}
    wrappers.reads_no_states(state_dict, distributed, (), {})
    assert set(offloader.residencies) == {Residency.RESIDENT}


def test_a_state_that_somebody_replaced_while_its_slab_was_away_is_saved_as_it_is():
    optimizer, offloader, _ = made()
    param = params(optimizer)[0]
    new = torch.full_like(optimizer.optimizer.state[param]["exp_avg"], 3.0)
    optimizer.optimizer.state[param]["exp_avg"] = new
    with offloader.saving(copies=True):
        handed = offloader.hand_out(param, read_as_it_is(optimizer, param))
    assert torch.equal(handed["exp_avg"], new)
    assert handed["exp_avg"].data_ptr() != new.data_ptr()
