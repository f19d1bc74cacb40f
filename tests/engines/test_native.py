"""The native engine: bytes, what is pinned, and tensors that others replace; see `test_any_order.py` for bits."""

from contextlib import nullcontext

import pytest
import torch
from fake_training import Training, masters_of

from bridge_fgo.engines import native, ranks
from bridge_fgo.memory.host_buffer import HostBuffer
from bridge_fgo.memory.host_memory import Pool
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.states.distributed import MegatronSource, bundles, home_device, live_bytes

SIZES = [1000, 3, 70_000, 256, 400_000, 12, 64]
MASTERS = 4 * sum(SIZES)


def make(**settings):
    """Return a training whose masters are copied whole, and its optimizer."""
    training = Training(**{"sizes": SIZES, "master_remainders": False, "slab_bytes": 2**20, **settings})
    return training, training.optimizers[0]


def live(optimizer):
    return live_bytes(bundles(optimizer), home_device(optimizer))


def most_released(training):
    training.begin()
    training.engine.require_writable()
    return training.engine.traffic.most_released


@pytest.mark.parametrize("beside", [0, 100])
def test_a_host_that_cannot_hold_states_and_gradients_is_refused_before_anything_is_pinned(monkeypatch, beside):
    nbytes = sum(slab.nbytes for slab in make()[0].slabs())
    locked = []
    monkeypatch.setattr(MegatronSource, "device", torch.device("cuda"))
    monkeypatch.setattr(native.Remainders, "ready", lambda remainders: None)
    monkeypatch.setattr(native, "page_lock", lambda buffers: locked.append(sum(b.tensor.nbytes for b in buffers)))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)

    def attach(count, host_bytes):
        monkeypatch.setattr(ranks, "pools", lambda: [Pool("host", host_bytes, host_bytes)])
        engine = make(optimizers=count, transfers=Transfers())[0].engine
        engine.hosts_beside = [HostBuffer(beside)] if beside else []
        assert engine.bytes_to_pin == count * nbytes + beside
        ranks.pin_on_every_rank(engine)
        assert not engine.hosts_beside, "the engine does not keep them"

    with pytest.raises(ValueError, match="host memory"):
        attach(1, nbytes + beside - 1)
    assert locked == []
    attach(1, nbytes + beside)
    with pytest.raises(ValueError, match=rf"pins {2 * nbytes + beside} bytes of host memory for rank 0"):
        attach(2, 2 * nbytes + beside - 1)
    assert locked == [nbytes + beside]
    attach(2, 2 * nbytes + beside)
    assert locked == [nbytes + beside, 2 * nbytes + beside]


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_fraction_releases_that_share_of_the_bytes(fraction):
    training, _ = make(fraction=fraction)
    training.update()
    assert fraction <= most_released(training) / (3 * MASTERS) < 1
    assert "fraction" in training.engine.resident_note()
    training.engine.begin_pass()
    assert training.engine.traffic.most_released == 0, "what a pass before has released is not this one's"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_replaced_tensor_is_taken_in_and_one_of_another_dtype_is_an_error_that_loses_nothing(dtype):
    training, optimizer = make()
    training.update()
    most_released(training)
    state = optimizer.optimizer.state[masters_of(optimizer)[2]]
    state["exp_avg"] = torch.ones(SIZES[2], dtype=dtype)
    with pytest.raises(RuntimeError, match="exp_avg") if dtype is torch.float64 else nullcontext():
        training.begin()
        assert live(optimizer) == 0
        training.engine.require_readable()
    assert torch.equal(state["exp_avg"], torch.ones(SIZES[2], dtype=dtype))


def test_memory_that_a_writer_shares_is_left_to_the_writer():
    training, optimizer = make()
    training.steps(2)
    most_released(training)
    shared = masters_of(optimizer)[2].numpy()
    saved = shared.tobytes()
    training.step()
    training.away()
    assert live(optimizer) == 0
    training.check()
    assert shared.shape == (SIZES[2],) and len(saved) == shared.nbytes


def test_fp8_moments_are_refused_by_name():
    class Float8(torch.Tensor):
        pass

    training, optimizer = make()
    training.update()
    param = masters_of(optimizer)[0]
    optimizer.optimizer.state[param]["exp_avg"] = torch.zeros(param.shape).as_subclass(Float8)
    state = next(s for b in bundles(optimizer) if b.param is param for s in b.states if s.name == "exp_avg")
    with pytest.raises(ValueError, match="exp_avg_dtype"):
        state.read()
