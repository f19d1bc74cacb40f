"""A source of a few lines is all that the native engine needs: a torch module trains bitwise equal, its state goes."""

import copy
import time

import pytest
import torch
from spies import note
from toy_source import TorchSource

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.memory.slab import SlabState
from bridge_fgo.memory.state_tensor import Bundle, Home, State
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.offload.profile import Mark

CONFIG = OffloadConfig(engine="native", piece_bytes=65536)


def make(device="cpu"):
    """Return a module with its AdamW, and a twin of both that is never offloaded."""
    torch.manual_seed(1)
    module = torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(12))).to(device)
    modules = module, copy.deepcopy(module)
    return [(each, torch.optim.AdamW(each.parameters(), lr=1e-2)) for each in modules]


def train(module, optimizer, data, engine=None):
    """Run one training step, with the engine's verbs in their order where there is one."""
    optimizer.zero_grad()
    if engine is None:
        module(data).square().mean().backward()
        optimizer.step()
        return
    (source,) = engine.sources
    with engine.training_step(kind=1):
        engine.begin_pass()
        engine.release()
        loss = data
        for number, layer in enumerate(module):
            engine.point(Mark(number, loss.nbytes, loss.nbytes))
            loss = layer(loss)
        loss.square().mean().backward()
        engine.reload()
        engine.updating()
        with engine.stepping(source):
            optimizer.step()
    engine.settle()
    engine.end_step(updated=True)


def states(optimizer):
    """Return every parameter and moment as it is, in order."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [t.clone() for p in params for t in (p.detach(), *optimizer.state[p].values())]


def trained(device, steps=6):
    """Train a module and its twin; return both optimizers and the engine of the first."""
    (module, optimizer), (twin, of_twin) = make(device)
    engine = NativeEngine([TorchSource(optimizer)], CONFIG, PeakMeter())
    engine.most_released = 0
    for seed in range(steps):
        data = torch.randn(8, 96, generator=torch.Generator().manual_seed(seed)).to(device)
        train(module, optimizer, data, engine)
        engine.most_released = max(engine.traffic.most_released, engine.most_released)
        train(twin, of_twin, data)
    return optimizer, of_twin, engine


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_torch_module_trains_bitwise_equal_with_moments_away_in_forward_and_back_after_close(device):
    optimizer, of_twin, engine = trained(device)
    engine.require_readable()
    assert all(torch.equal(a, b) for a, b in zip(states(optimizer), states(of_twin), strict=True))
    moments = sum(2 * p.nbytes for group in optimizer.param_groups for p in group["params"])
    assert engine.state_bytes == engine.planned_bytes == moments
    assert engine.most_released >= moments  # of any step: where all fits, a GPU keeps them once peaks are known
    engine.begin_pass()
    engine.release()
    engine.close()
    assert engine.sources == [] and engine.slabs == []
    assert all(torch.equal(a, b) for a, b in zip(states(optimizer), states(of_twin), strict=True))


def test_where_the_step_is_not_divided_all_states_are_on_the_gpu_as_more_are_made():
    optimizer, _, engine = trained("cpu", 2)
    optimizer.register_step_post_hook(lambda *_: None)
    engine.offload_now()
    seen = []
    engine.make_states(engine.sources[0], lambda: seen.extend(slab.state for slab in engine.slabs))
    assert set(seen) == {SlabState.RESIDENT}


def test_the_hosts_time_of_every_move_is_counted(monkeypatch):
    _, _, engine = trained("cpu", 2)
    engine.require_writable()
    before, moved = engine.traffic.seconds, []
    monkeypatch.setattr(time, "perf_counter", lambda: len(moved))
    for name in ("copy_out", "release", "copy_in", "wait_in"):
        note(monkeypatch, moved, Transfers, name, name)
    engine.offload_now()
    engine.require_readable()
    assert engine.traffic.seconds - before == pytest.approx(len(moved)) and len(moved) == 4 * len(engine.slabs)


class BufferSource(TorchSource):
    """One flat buffer that parameters are views of, as DDP's: emptied and filled in place, never rebound."""

    def __init__(self, optimizer, buffer):
        super().__init__(optimizer)
        self.buffer = buffer

    def states(self):
        buffer, home = self.buffer, Home(self.buffer.nbytes)
        return [Bundle(buffer, [State("buffer", "buffer", buffer, torch.float32, lambda: buffer, home=home)])]


@pytest.mark.parametrize("device", DEVICES)
def test_a_storage_that_others_hold_views_of_is_emptied_and_filled_in_place(device):
    buffer = torch.randn(1000, device=device)
    views, before = [buffer[:300], buffer[300:]], buffer.clone()
    engine = NativeEngine([BufferSource(torch.optim.AdamW(views), buffer)], CONFIG, PeakMeter())
    for _ in range(3):
        engine.begin_pass()
        engine.release()
        assert buffer.untyped_storage().nbytes() == 0 == engine.schedule.ledger.nbytes
        engine.require_writable()
        assert engine.schedule.ledger.nbytes == buffer.nbytes
        assert torch.equal(buffer, before) and torch.equal(torch.cat(views), before)
        assert views[1].data_ptr() == buffer.data_ptr() + 1200


def test_a_storage_that_somebody_shares_stays_and_a_view_of_a_larger_one_cannot_be_emptied():
    buffer = torch.randn(1000)
    engine = NativeEngine([BufferSource(torch.optim.AdamW([buffer]), buffer)], CONFIG, PeakMeter())
    shared = buffer.numpy()
    engine.begin_pass()
    with pytest.raises(RuntimeError, match="'buffer' cannot be emptied"):
        engine.release()
    assert buffer.untyped_storage().nbytes() == shared.nbytes and not engine.is_lost
    engine.require_writable()

    buffer = torch.randn(1000)[:500]
    engine = NativeEngine([BufferSource(torch.optim.AdamW([buffer]), buffer)], CONFIG, PeakMeter())
    with pytest.raises(RuntimeError, match="only a whole storage can be emptied in place"):
        engine.begin_pass()
