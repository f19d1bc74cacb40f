"""Generation 2 under its engine: upstream's verbs in Megatron-LM's order, with and without late readers."""

from types import SimpleNamespace

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, step

import bridge_fgo
from bridge_fgo.bridge.session import Session
from bridge_fgo.engines.mcore import Generation2, McoreEngine
from bridge_fgo.states.distributed import MegatronSource


class FakeGeneration2:
    """A DistributedOptimizer of generation 2, which really binds host tensors while states are out."""

    def __init__(self, mxfp8):
        self.__dict__.update(vars(make_distributed_optimizer([100, 3000])))
        self.buffers[0].grad_data = torch.zeros(1, device="meta")  # so that host tensors are not at home
        self.config = SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=mxfp8, overlap_param_gather=mxfp8)
        self.events = []
        masters = self.shard_fp32_from_float16_groups[0]
        d2h = SimpleNamespace(synchronize=lambda: self.events.append("wait for copies out"))
        self._optimizer_state_offloader = SimpleNamespace(
            selected_params=masters, _cpu_master={}, _cpu_state={}, _d2h_stream=d2h, _h2d_stream="copies in"
        )

    def offload_optimizer_state_for_forward(self, offload_master=True):
        self.events.append(f"offload masters={offload_master}")

    def prefetch_optimizer_state_for_gradient_finalization(self):
        self.events.append("prefetch")

    def ensure_master_weights_for_param_sync(self):
        self.events.append("ensure masters")


def engine_of(optimizer):
    return McoreEngine(Generation2.name, [MegatronSource(optimizer)])


@pytest.mark.parametrize(
    ("mxfp8", "expected"),
    [
        (False, ["offload masters=True", "prefetch"]),
        (True, ["offload masters=False", "offload masters=True", "prefetch"]),
    ],
)
def test_verbs_come_in_upstreams_order(mxfp8, expected):
    optimizer = FakeGeneration2(mxfp8)
    engine = engine_of(optimizer)
    engine.begin_pass()
    engine.release()
    engine.reload()
    assert optimizer.events == expected


def test_release_and_reload_without_offload_do_nothing():
    optimizer = FakeGeneration2(mxfp8=True)
    engine = engine_of(optimizer)
    engine.release()
    assert engine.traffic.most_released == 0
    engine.reload()
    assert optimizer.events == []


def test_released_bytes_are_those_off_the_gpu():
    optimizer = FakeGeneration2(mxfp8=False)
    step(optimizer, 0)
    engine = engine_of(optimizer)
    engine.begin_pass()
    engine.release()
    assert engine.traffic.most_released == 3 * 4 * 3100 == engine.state_bytes == engine.planned_bytes
    assert engine.traffic.out == 3 * 4 * 3100
    engine.reload()
    assert (engine.traffic.back, engine.traffic.released) == (3 * 4 * 3100, 0)


@pytest.fixture
def optimizer(monkeypatch):
    optimizer = FakeGeneration2(mxfp8=False)
    stream = SimpleNamespace(wait_stream=lambda other: optimizer.events.append(f"stream waits for {other}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return optimizer


def test_readers_get_the_masters_and_whole_moments(optimizer):
    engine_of(optimizer).require_readable()
    assert optimizer.events == ["ensure masters", "stream waits for copies in", "wait for copies out"]


def test_reload_states_waits_for_the_copies_out_too(optimizer, monkeypatch):
    # Moments are bound to host memory while these go on: they would be torn, and what is written overwritten.
    session = Session.__new__(Session)
    session.engine, session.closed = engine_of(optimizer), False
    monkeypatch.setattr("bridge_fgo.bridge.session._sessions", {session})
    bridge_fgo.reload_states()
    assert "wait for copies out" in optimizer.events


@pytest.mark.parametrize(
    "read",
    [
        lambda engine, source: engine.saving(source, copies=True).__enter__(),
        lambda engine, source: engine.hand_out(source, None, dict),
        lambda engine, source: engine.write_back(source, lambda: None),
        lambda engine, source: engine.close(),
    ],
    ids=["a save", "a state that is handed out", "the copy to the model", "the end of the session"],
)
def test_every_reader_waits_for_the_copies_out(optimizer, read):
    engine = engine_of(optimizer)
    read(engine, *engine.sources)
    assert optimizer.events[-1] == "wait for copies out"


@pytest.mark.parametrize("write", ["stepping", "overwriting_masters"])
def test_every_writer_waits_for_the_copies_in(optimizer, write):
    engine = engine_of(optimizer)
    with getattr(engine, write)(*engine.sources):
        assert optimizer.events == ["ensure masters", "stream waits for copies in"]


@pytest.mark.parametrize("verb", ["settle", "require_writable"])
def test_a_first_chunk_whose_update_did_not_come_lands_and_the_host_does_not_stop(optimizer, verb):
    getattr(engine_of(optimizer), verb)()
    assert optimizer.events == ["ensure masters", "stream waits for copies in"]


def test_it_is_found_by_its_verbs():
    assert Generation2.is_available(FakeGeneration2)
    assert not Generation2.is_available(torch.optim.AdamW)


def test_what_the_fraction_leaves_on_the_gpu_is_neither_planned_nor_kept_quiet():
    optimizer = FakeGeneration2(mxfp8=False)
    optimizer._optimizer_state_offloader.selected_params = optimizer.shard_fp32_from_float16_groups[0][:1]
    engine = engine_of(optimizer)
    assert (engine.planned_bytes, engine.state_bytes) == (3 * 4 * 100, 3 * 4 * 3100)
    assert engine.resident_note().endswith("GiB of state by optimizer.optimizer_state_offload_fraction")
    assert engine_of(FakeGeneration2(mxfp8=False)).resident_note() == ""


def test_pinned_memory_is_that_of_upstreams_buffers_rounded_as_pytorch_does():
    optimizer = FakeGeneration2(mxfp8=False)
    engine = engine_of(optimizer)
    assert engine.pinned_bytes == 0
    master = optimizer.shard_fp32_from_float16_groups[0][0]
    optimizer._optimizer_state_offloader._cpu_master[master] = torch.zeros(100)
    optimizer._optimizer_state_offloader._cpu_state[master] = {"exp_avg": torch.zeros(3000)}
    assert engine.pinned_bytes == 512 + 16384
