"""mcore's own offloaders under their engine: upstream's verbs in their order, and the waits that upstream leaves out.

The fake of generation 1 has upstream's surface and its flaw: a reload counts as done as soon as it is started, and only
`sync_before_step` makes it so.
"""

from types import SimpleNamespace

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, step
from fake_training import masters_of

import bridge_fgo
from bridge_fgo.bridge.session import Session
from bridge_fgo.bridge.table import LOADERS, OF_DISTRIBUTED
from bridge_fgo.bridge.table import READERS as SAVERS
from bridge_fgo.engines.lease import EngineLease
from bridge_fgo.engines.mcore import Generation1, Generation2, McoreEngine
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.states.distributed import MegatronSource, bundles, home_device, live_bytes

SIZES = [100, 3000]
MASTERS = 4 * sum(SIZES)


class FakeStateOffloader:
    """Upstream's OptimizerStateOffloader, on the CPU, with copies that land only when waited for."""

    def __init__(self, optimizer, events):
        self.optimizer, self.events = optimizer, events
        self._opt_state_cpu_buffers, self._shard_fp32_from_float16_cpu_buffers = {}, []
        self.initialized, self.in_flight = False, []

    def mark_optimizer_states_initialized(self):
        self.events.append("mark")
        self.initialized = True

    def tensors(self):
        moments = [s[k] for s in self.optimizer.optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
        return [*masters_of(self.optimizer), *(moments if self.initialized else [])]

    def sync_before_step(self):
        self.events.append("wait")
        for tensor, host in self.in_flight:
            tensor.copy_(host)
        self.in_flight = []


class FakeGeneration1:
    """A DistributedOptimizer of generation 1."""

    def __init__(self):
        self.__dict__.update(vars(make_distributed_optimizer(SIZES)))
        self.events = []
        self._state_offloader = FakeStateOffloader(self, self.events)

    def offload_states(self):
        self.events.append("offload")
        offloader = self._state_offloader
        assert all(t.untyped_storage().nbytes() for t in offloader.tensors())
        self.host = [(t, t.clone()) for t in offloader.tensors()]
        offloader._shard_fp32_from_float16_cpu_buffers = [[h for _, h in self.host]]

    def release_offloaded_gpu_states(self):
        self.events.append("release")
        for tensor, _ in self.host:
            tensor.untyped_storage().resize_(0)

    def reload_offloaded_states(self):
        self.events.append("reload")
        for tensor, host in self.host:
            tensor.untyped_storage().resize_(host.nbytes)
            tensor.fill_(float("nan"))  # what has not landed must not be read
        self._state_offloader.in_flight = list(self.host)


class FakeGeneration2:
    """A DistributedOptimizer of generation 2, which really binds host tensors while states are out."""

    def __init__(self, mxfp8=False):
        self.__dict__.update(vars(make_distributed_optimizer(SIZES)))
        self.buffers[0].grad_data = torch.zeros(1, device="meta")  # so that host tensors are not at home
        self.config = SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=mxfp8, overlap_param_gather=mxfp8)
        self.events = []
        d2h = SimpleNamespace(synchronize=lambda: self.events.append("wait for copies out"))
        self._optimizer_state_offloader = SimpleNamespace(
            selected_params=masters_of(self), _cpu_master={}, _cpu_state={}, _d2h_stream=d2h, _h2d_stream="copies in"
        )

    def offload_optimizer_state_for_forward(self, offload_master=True):
        self.events.append(f"offload masters={offload_master}")

    def prefetch_optimizer_state_for_gradient_finalization(self):
        self.events.append("prefetch")

    def ensure_master_weights_for_param_sync(self):
        self.events.append("ensure masters")


def engine_of(*optimizers, member=Generation1):
    return McoreEngine(member.name, [MegatronSource(optimizer) for optimizer in optimizers])


def second(*args, **kwargs):
    """Return an optimizer of generation 2, and its engine."""
    optimizer = FakeGeneration2(*args, **kwargs)
    return optimizer, engine_of(optimizer, member=Generation2)


@pytest.fixture
def optimizer():
    """Of generation 1."""
    return FakeGeneration1()


@pytest.fixture
def of_second(monkeypatch):
    """An optimizer of generation 2 on a stream that tells what it waits for, and its engine."""
    optimizer, engine = second()
    stream = SimpleNamespace(wait_stream=lambda other: optimizer.events.append(f"stream waits for {other}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return optimizer, engine


def away(engine):
    engine.begin_pass()
    engine.release()


def enter(context):
    with context:
        pass


def patched(name, act=lambda: None):
    """Return a function that calls a method of an engine's optimizer as the table of patches has it called."""

    def call(engine, source):
        EngineLease("step", [source], engine, bridge_fgo.OffloadConfig(), PeakMeter()).is_stepped = True
        (wrapper,) = (wrapper for names, wrapper, *_ in OF_DISTRIBUTED if name in names)
        assert wrapper(lambda: [act(), name], source.optimizer, (), {})[1] == name

    return call


WRITERS = {
    "the optimizer step": lambda engine, source: enter(engine.stepping(source)),
    "the end of the session": lambda engine, source: engine.close(),
    **{
        name: patched(name)
        for name in (
            *LOADERS, "load_parameter_state_from_dp_zero_legacy", "load_state_dict",
            "_set_main_param_and_optimizer_states", "_copy_model_params_to_main_params",
        )
    },
}  # fmt: skip
PATCHED_READERS = (
    *SAVERS, "sharded_state_dict", "state_dict", "_get_main_param_and_optimizer_states",
    "_copy_main_params_to_model_params", "_copy_main_params_to_param_buffer",
)  # fmt: skip
READERS = {
    "the end of the training step": lambda engine, source: engine.settle(),
    **{name: patched(name) for name in PATCHED_READERS},
}


@pytest.mark.parametrize(("member", "fake"), [(Generation1, FakeGeneration1), (Generation2, FakeGeneration2)])
def test_a_generation_is_found_by_its_verbs(member, fake):
    assert member.is_available(fake)
    assert not member.is_available(torch.optim.AdamW)


# Generation 1.


def test_a_second_pass_waits_before_it_copies_out_and_bits_survive_reruns_skips_and_early_reads(optimizer):
    engine = engine_of(optimizer)
    for _ in range(2):
        away(engine)
        engine.reload()
    assert optimizer.events == ["offload", "release", "reload", "wait", "offload", "release", "reload"]
    optimizer = FakeGeneration1()
    resident = make_distributed_optimizer(SIZES)
    engine = engine_of(optimizer)
    for seed in range(6):
        for _ in range(1 + seed % 2):  # every second step is rerun
            away(engine)
            engine.reload()
        if seed % 3 == 2:  # a skipped step: nothing waits, and the next pass comes
            continue
        engine.require_writable()
        step(optimizer, seed)
        step(resident, seed)
    engine.require_readable()
    assert all(torch.equal(*pair) for pair in zip(masters_of(optimizer), masters_of(resident), strict=True))


def test_moments_from_a_checkpoint_go_in_the_first_forward_and_are_not_marked_before_they_exist(optimizer):
    # Upstream counts moments as made only after a step of this process.
    engine_of(other := FakeGeneration1()).begin_pass()
    assert other.events == ["offload"]
    step(optimizer, 0)
    engine = engine_of(optimizer)
    engine.begin_pass()
    assert "mark" in optimizer.events
    before = live_bytes(bundles(optimizer), home_device(optimizer))
    engine.release()
    assert engine.traffic.released == engine.traffic.most_released == before > 0
    assert live_bytes(bundles(optimizer), home_device(optimizer)) == 0


def test_bytes_and_pinned_memory_are_counted_of_the_newest_pass(optimizer):
    engine = engine_of(optimizer)
    traffic = engine.traffic
    away(engine)
    assert traffic.released == MASTERS
    engine.reload()
    assert traffic.out == traffic.back == traffic.most_released == MASTERS
    assert traffic.released == 0
    assert engine.pinned_bytes == 512 + 16384
    engine.require_writable()
    step(optimizer, 0)  # makes the moments
    away(engine)
    assert traffic.most_released == 3 * MASTERS
    engine.reload()
    engine.begin_pass()
    assert traffic.most_released == 0
    for _ in range(2):
        engine.release()
    assert traffic.most_released == traffic.released == 3 * MASTERS


@pytest.mark.parametrize("who", [*READERS, *WRITERS])
@pytest.mark.parametrize("reloads", [False, True])
def test_whoever_needs_the_states_in_mid_pass_waits_for_them(optimizer, who, reloads):
    engine = engine_of(optimizer)
    away(engine)
    if reloads:
        engine.reload()
    (READERS | WRITERS)[who](engine, *engine.sources)
    assert optimizer.events == ["offload", "release", "reload", "wait"]


@pytest.mark.parametrize("who", WRITERS)
def test_states_that_were_written_on_their_way_out_are_not_released(optimizer, who):
    engine = engine_of(optimizer)
    engine.begin_pass()
    WRITERS[who](engine, *engine.sources)
    engine.release()
    assert optimizer.events == ["offload"]


def test_masters_that_are_read_in_each_pass_beside_their_copies_out_are_released(optimizer):
    engine = engine_of(optimizer)
    engine.begin_pass()
    patched("_copy_main_params_to_param_buffer", lambda: masters_of(optimizer)[0] + 1)(engine, *engine.sources)
    engine.release()
    assert optimizer.events == ["offload", "release"]


def test_of_two_optimizers_a_writer_brings_back_its_own(optimizer):
    both = optimizer, FakeGeneration1()
    engine = engine_of(*both)
    away(engine)
    engine.require_writable(engine.sources[1])
    assert [each.events for each in both] == [["offload", "release"], ["offload", "release", "reload", "wait"]]
    assert (engine.traffic.most_released, engine.traffic.released) == (2 * MASTERS, MASTERS)
    engine.require_writable()
    assert both[0].events == both[1].events
    assert engine.traffic.released == 0


def test_what_comes_in_the_midst_of_upstreams_release_is_lost(optimizer):
    engine = engine_of(optimizer)
    engine.begin_pass()
    assert not engine.is_lost

    def interrupted():
        raise KeyboardInterrupt

    optimizer.release_offloaded_gpu_states = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.release()
    assert engine.is_lost
    with pytest.raises(RuntimeError, match="KeyboardInterrupt came"):
        engine.require_readable()


def test_an_engine_of_generation_1_offloads_every_state_and_none_before_there_are_optimizers(optimizer):
    engine = engine_of(optimizer, FakeGeneration1())
    assert engine.name == "mcore generation 1"
    assert engine.state_bytes == engine.planned_bytes == 2 * 3 * MASTERS
    assert engine.existing_bytes() and engine.resident_note() == ""
    empty = engine_of()
    for verb in (empty.begin_pass, empty.release, empty.reload, empty.settle, empty.require_writable, empty.close):
        verb()
    assert (empty.state_bytes, empty.pinned_bytes, empty.existing_bytes(), empty.is_lost) == (0, 0, 0, False)


# Generation 2.


@pytest.mark.parametrize(
    ("mxfp8", "expected"),
    [
        (False, ["offload masters=True", "prefetch"]),
        (True, ["offload masters=False", "offload masters=True", "prefetch"]),
    ],
)
def test_verbs_come_in_upstreams_order_and_do_nothing_without_an_offload(mxfp8, expected):
    optimizer, engine = second(mxfp8)
    engine.release()
    assert engine.traffic.most_released == 0
    engine.reload()
    assert optimizer.events == []
    away(engine)
    engine.reload()
    assert optimizer.events == expected


def test_released_bytes_are_those_off_the_gpu():
    optimizer, _ = second()
    step(optimizer, 0)
    engine = engine_of(optimizer, member=Generation2)
    away(engine)
    assert engine.traffic.most_released == 3 * MASTERS == engine.state_bytes == engine.planned_bytes
    assert engine.traffic.out == 3 * MASTERS
    engine.reload()
    assert (engine.traffic.back, engine.traffic.released) == (3 * MASTERS, 0)


def test_readers_and_reload_states_get_masters_and_whole_moments_once_copies_out_are_done(of_second, monkeypatch):
    optimizer, engine = of_second
    engine.require_readable()
    assert optimizer.events == ["ensure masters", "stream waits for copies in", "wait for copies out"]
    # Moments are bound to host memory while these go on: they would be torn, and what is written overwritten.
    optimizer, engine = of_second
    session = Session.__new__(Session)
    session.engine, session.closed = engine, False
    monkeypatch.setattr("bridge_fgo.bridge.session._sessions", {session})
    bridge_fgo.reload_states()
    assert "wait for copies out" in optimizer.events


@pytest.mark.parametrize("who", [*PATCHED_READERS, "the end of the session"])
def test_every_reader_waits_for_the_copies_out(of_second, who):
    optimizer, engine = of_second
    (READERS | WRITERS)[who](engine, *engine.sources)
    assert optimizer.events[-1] == "wait for copies out"


@pytest.mark.parametrize("who", [*sorted(WRITERS.keys() - {"the end of the session"}), "the end of the training step"])
def test_every_writer_waits_for_the_copies_in_also_where_no_update_came_and_the_host_does_not_stop(of_second, who):
    optimizer, engine = of_second
    (READERS | WRITERS)[who](engine, *engine.sources)
    assert optimizer.events == ["ensure masters", "stream waits for copies in"]


def test_what_the_fraction_leaves_is_said_and_pinned_memory_is_that_of_upstreams_buffers():
    optimizer, engine = second()
    assert engine.resident_note() == ""
    optimizer._optimizer_state_offloader.selected_params = masters_of(optimizer)[:1]
    engine = engine_of(optimizer, member=Generation2)
    assert (engine.planned_bytes, engine.state_bytes) == (3 * 4 * SIZES[0], 3 * MASTERS)
    assert engine.resident_note().endswith("MiB of state by optimizer.optimizer_state_offload_fraction")
    optimizer, engine = second()
    assert engine.pinned_bytes == 0
    master, offloader = masters_of(optimizer)[0], optimizer._optimizer_state_offloader
    offloader._cpu_master[master] = torch.zeros(100)
    offloader._cpu_state[master] = {"exp_avg": torch.zeros(3000)}
    assert engine.pinned_bytes == 512 + 16384
