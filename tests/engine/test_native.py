"""The native engine on a real AdamW in host memory: bits, bytes and identity."""

import copy

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, state_bytes, step
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engine import host_memory, native
from bridge_fgo.engine.debug import debugged
from bridge_fgo.engine.native import NativeOffloader
from bridge_fgo.engine.peaks import PeakMeter
from bridge_fgo.engine.residency import Residency
from bridge_fgo.engine.schedule import Schedule
from bridge_fgo.engine.states import bundles, home_device, live_bytes
from bridge_fgo.engine.transfers import HostTransfers

SIZES = [1000, 3, 70_000, 256, 400_000, 12, 64]
MIB = 2**20


def make_schedule(config):
    return Schedule(debugged(HostTransfers(config.piece_bytes)), PeakMeter())


def make(config=None, **kwargs):
    optimizer = make_distributed_optimizer(SIZES, **kwargs)
    config = config or OffloadConfig(engine="native", slab_bytes=MIB, piece_bytes=65536)
    return optimizer, NativeOffloader(optimizer, config, make_schedule(config))


def live(optimizer):
    return live_bytes(bundles(optimizer), home_device(optimizer))


def one_pass(offloader):
    offloader.offload()
    offloader.release()
    offloader.reload()
    offloader.require_writable()
    return offloader.released_bytes


def test_a_host_that_cannot_hold_the_states_of_all_optimizers_is_refused_before_anything_is_pinned(monkeypatch):
    config = OffloadConfig(engine="native")
    nbytes = sum(slab.nbytes for slab in make(config)[1].slabs)
    locked = []
    monkeypatch.setattr(native, "home_device", lambda optimizer: torch.device("cuda"))
    monkeypatch.setattr(native.MasterRemainders, "ready", lambda remainders: None)
    monkeypatch.setattr(native, "local_cpus", lambda device: None)
    monkeypatch.setattr(native, "page_lock", lambda buffers, cpus: locked.append(sum(b.tensor.nbytes for b in buffers)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    schedule = make_schedule(config)

    def attach(host_bytes):
        monkeypatch.setattr(host_memory, "available_bytes", lambda: host_bytes)
        monkeypatch.setattr(host_memory, "total_bytes", lambda: host_bytes)
        return NativeOffloader(make_distributed_optimizer(SIZES), config, schedule)

    with pytest.raises(ValueError, match="host memory"):
        attach(2 * nbytes - 1)
    assert (locked, schedule.parts) == ([], [])
    attach(2 * nbytes)
    with pytest.raises(ValueError, match="host memory"):
        attach(4 * nbytes - 1)
    assert locked == [nbytes]
    attach(4 * nbytes)
    assert locked == [nbytes] * 2


def test_masters_go_before_the_first_step_and_moments_after_it():
    optimizer, offloader = make()
    masters = 4 * sum(SIZES)
    slack = 256 * len(SIZES) * 3
    assert masters <= one_pass(offloader) <= masters + slack
    step(optimizer, 1)
    assert 3 * masters <= one_pass(offloader) <= 3 * masters + slack


def test_twenty_steps_are_bitwise_equal_to_resident():
    resident = make_distributed_optimizer(SIZES, fp32_views=2)
    optimizer, offloader = make(fp32_views=2)
    for seed in range(20):
        step(resident, seed)
        one_pass(offloader)
        step(optimizer, seed)
    assert state_bytes(optimizer) == state_bytes(resident)


def test_released_states_hold_no_memory():
    optimizer, offloader = make()
    step(optimizer, 1)
    offloader.offload()
    offloader.release()
    assert live(optimizer) == 0
    assert set(offloader.residencies) == {Residency.RELEASED}


def test_at_the_end_of_a_training_step_what_is_coming_has_come_and_the_rest_stays_away():
    optimizer, offloader = make()
    step(optimizer, 1)
    offloader.offload()
    offloader.release()
    offloader._slabs[0].tracker.reload()
    offloader.settle()
    assert offloader.residencies == [Residency.RESIDENT, *[Residency.RELEASED] * (len(offloader.slabs) - 1)]


def test_views_of_the_ddp_buffer_are_never_moved():
    optimizer, offloader = make(fp32_views=3)
    step(optimizer, 1)
    buffer = optimizer.buffers[0].param_data
    before = buffer.clone()
    views = optimizer.optimizer.param_groups[0]["params"][:3]
    offloader.offload()
    offloader.release()
    for index, view in enumerate(views):
        assert view.data_ptr() == buffer.data_ptr() + 32 * index
        assert optimizer.optimizer.state[view]["exp_avg"].untyped_storage().nbytes() == 0  # its moments went
    assert torch.equal(buffer, before)


def test_tensors_keep_their_identity_and_attributes():
    optimizer, offloader = make()
    step(optimizer, 1)
    masters = optimizer.shard_fp32_from_float16_groups[0]
    masters[0].tensor_model_parallel = True
    moment = optimizer.optimizer.state[masters[0]]["exp_avg"]
    before = moment.clone()
    one_pass(offloader)
    assert optimizer.optimizer.param_groups[0]["params"][0] is masters[0]
    assert masters[0].tensor_model_parallel
    assert optimizer.optimizer.state[masters[0]]["exp_avg"] is moment
    assert torch.equal(moment, before)


def test_asking_for_a_state_does_not_make_an_entry():
    # TE's FusedAdam and torch's Adam take an existing empty entry for an initialised one.
    optimizer, offloader = make()
    one_pass(offloader)
    assert not optimizer.optimizer.state


def test_tensors_that_a_load_replaced_are_taken_in_again():
    optimizer, offloader = make()
    step(optimizer, 1)
    one_pass(offloader)
    param = optimizer.shard_fp32_from_float16_groups[0][2]
    loaded = torch.randn(param.shape)
    optimizer.optimizer.state[param]["exp_avg"] = loaded.clone()
    offloader.offload()
    offloader.release()
    assert live(optimizer) == 0
    offloader.require_readable()
    assert torch.equal(optimizer.optimizer.state[param]["exp_avg"], loaded)


def load_state_dict(optimizer):
    """Load a copy of the state as torch and mcore do: the dictionary and every tensor in it are replaced."""
    state = copy.deepcopy(optimizer.optimizer.state_dict())
    optimizer.optimizer.load_state_dict(state)


def test_states_of_a_load_before_the_first_step_go_too():
    trained = make_distributed_optimizer(SIZES)
    step(trained, 1)
    optimizer, offloader = make()
    one_pass(offloader)
    optimizer.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
    assert one_pass(offloader) >= 3 * 4 * sum(SIZES)
    offloader.offload()
    offloader.release()
    assert live(optimizer) == 0


def test_states_of_a_load_in_mid_run_go_and_the_old_ones_memory_too():
    resident = make_distributed_optimizer(SIZES)
    optimizer, offloader = make()
    for seed in range(3):
        step(resident, seed)
        offloader.require_writable()
        step(optimizer, seed)
        one_pass(offloader)
        offloader.require_writable()
        load_state_dict(optimizer)
        offloader.states_replaced()
        late = [slab for slab in offloader.slabs if slab.refs[0].key is not None]
        assert all(slab.gpu_bytes == 0 for slab in late), "memory of tensors that nobody holds"
        offloader.offload()
        offloader.release()
        assert live(optimizer) == 0
        offloader.reload()
    offloader.require_readable()
    assert state_bytes(optimizer) == state_bytes(resident)


def test_memory_that_a_writer_shares_is_left_to_the_writer():
    resident = make_distributed_optimizer(SIZES)
    optimizer, offloader = make()
    for seed in range(3):
        step(resident, seed)
        one_pass(offloader)
        step(optimizer, seed)
        if seed == 1:
            one_pass(offloader)
            shared = optimizer.shard_fp32_from_float16_groups[0][2].numpy()
            saved = shared.tobytes()
    offloader.offload()
    offloader.release()
    assert live(optimizer) == 0
    offloader.require_readable()
    assert state_bytes(optimizer) == state_bytes(resident)
    assert shared.shape == (SIZES[2],) and len(saved) == shared.nbytes


def test_a_load_of_another_dtype_is_an_error_and_loses_nothing():
    optimizer, offloader = make()
    step(optimizer, 1)
    one_pass(offloader)
    param = optimizer.shard_fp32_from_float16_groups[0][2]
    optimizer.optimizer.state[param]["exp_avg"] = torch.ones(param.shape, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="exp_avg"):
        offloader.offload()
    assert torch.equal(optimizer.optimizer.state[param]["exp_avg"], torch.ones(param.shape, dtype=torch.float64))


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_fraction_releases_that_share_of_the_bytes(fraction):
    config = OffloadConfig(engine="native", fraction=fraction, slab_bytes=MIB)
    optimizer, offloader = make(config)
    step(optimizer, 1)
    total = live(optimizer)
    freed = one_pass(offloader)
    assert freed >= fraction * total
    assert "fraction" in offloader.resident_note()


def test_only_moments_or_only_masters_go_when_asked():
    for config, share in ((OffloadConfig(master_weights=False), 2), (OffloadConfig(moments=False), 1)):
        optimizer, offloader = make(config)
        step(optimizer, 1)
        freed = one_pass(offloader)
        assert share * 4 * sum(SIZES) <= freed <= share * 4 * sum(SIZES) + 256 * 3 * len(SIZES)


def test_state_bytes_are_known_before_the_first_step():
    optimizer, offloader = make()
    predicted = offloader.state_bytes
    step(optimizer, 1)
    assert predicted == live(optimizer)


def test_close_leaves_the_states_usable():
    resident = make_distributed_optimizer(SIZES)
    optimizer, offloader = make()
    for seed in range(2):
        step(resident, seed)
        step(optimizer, seed)
        offloader.offload()
        offloader.release()
        offloader.require_writable()
    offloader.offload()
    offloader.release()
    offloader.close()
    step(resident, 9)
    step(optimizer, 9)
    assert state_bytes(optimizer) == state_bytes(resident)


def test_fp8_moments_are_refused_by_name():
    class Float8(torch.Tensor):
        pass

    optimizer, _ = make()
    step(optimizer, 1)
    param = optimizer.shard_fp32_from_float16_groups[0][0]
    optimizer.optimizer.state[param]["exp_avg"] = torch.zeros(param.shape).as_subclass(Float8)
    ref = next(r for b in bundles(optimizer) if b.param is param for r in b.refs if r.key == "exp_avg")
    with pytest.raises(ValueError, match="exp_avg_dtype"):
        ref.tensor()


class AnyOrderOfVerbs(RuleBasedStateMachine):
    """Any order of the public verbs, loads and steps leaves the bits of a run that never offloaded."""

    def __init__(self):
        super().__init__()
        self.resident = make_distributed_optimizer([100, 7, 5000], fp32_views=1)
        self.optimizer = make_distributed_optimizer([100, 7, 5000], fp32_views=1)
        config = OffloadConfig(engine="native", slab_bytes=MIB, piece_bytes=65536)
        self.offloader = NativeOffloader(self.optimizer, config, make_schedule(config))

    @rule()
    def offload(self):
        self.offloader.offload()

    @rule()
    def release(self):
        self.offloader.release()

    @rule()
    def reload(self):
        self.offloader.reload()

    @rule()
    def read(self):
        self.offloader.require_readable()
        assert state_bytes(self.optimizer) == state_bytes(self.resident)

    @rule(seed=st.integers(0, 100))
    def train(self, seed):
        self.offloader.require_writable()
        step(self.optimizer, seed)
        step(self.resident, seed)

    @rule(seed=st.integers(0, 100))
    def load(self, seed):
        self.offloader.require_writable()
        for optimizer in (self.resident, self.optimizer):
            generator = torch.Generator().manual_seed(seed)
            for param in optimizer.shard_fp32_from_float16_groups[0]:
                param.data.copy_(torch.randn(param.shape, generator=generator))
                if param in optimizer.optimizer.state:
                    optimizer.optimizer.state[param]["exp_avg"] = torch.randn(param.shape, generator=generator)
            load_state_dict(optimizer)
        self.offloader.states_replaced()

    def teardown(self):
        self.offloader.require_readable()
        assert state_bytes(self.optimizer) == state_bytes(self.resident)


TestAnyOrderOfVerbs = AnyOrderOfVerbs.TestCase
TestAnyOrderOfVerbs.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
