"""Generation 1 under its engine: upstream's verbs in the right states, and the waits that upstream leaves out.

The fake has upstream's surface and its flaw: a reload counts as done as soon as it is started, and only
`sync_before_step` makes it so.
"""

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, step

from bridge_fgo.engines.mcore import Generation1, McoreEngine
from bridge_fgo.states.distributed import MegatronSource, bundles, home_device, live_bytes


class FakeStateOffloader:
    """Upstream's OptimizerStateOffloader, on the CPU, with copies that land only when waited for."""

    def __init__(self, optimizer, events):
        self.optimizer = optimizer
        self.events = events
        self._opt_state_cpu_buffers = {}
        self._shard_fp32_from_float16_cpu_buffers = []
        self.initialized = False
        self.in_flight = []

    def mark_optimizer_states_initialized(self):
        self.events.append("mark")
        self.initialized = True

    def tensors(self):
        masters = self.optimizer.shard_fp32_from_float16_groups[0]
        moments = [s[k] for s in self.optimizer.optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
        return [*masters, *(moments if self.initialized else [])]

    def sync_before_step(self):
        self.events.append("wait")
        for tensor, host in self.in_flight:
            tensor.copy_(host)
        self.in_flight = []


class FakeGeneration1:
    """A DistributedOptimizer of generation 1."""

    def __init__(self, sizes=(100, 3000)):
        bare = make_distributed_optimizer(list(sizes))
        self.__dict__.update(vars(bare))
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


@pytest.fixture
def optimizer():
    return FakeGeneration1()


def engine_of(*optimizers):
    return McoreEngine(Generation1.name, [MegatronSource(optimizer) for optimizer in optimizers])


def test_it_is_found_by_its_verbs():
    assert Generation1.is_available(FakeGeneration1)
    assert not Generation1.is_available(torch.optim.AdamW)


def test_a_second_pass_waits_before_it_copies_out(optimizer):
    engine = engine_of(optimizer)
    for _ in range(2):
        engine.begin_pass()
        engine.release()
        engine.reload()
    assert optimizer.events == ["offload", "release", "reload", "wait", "offload", "release", "reload"]


def test_bits_survive_reruns_skips_and_early_reads(optimizer):
    resident = make_distributed_optimizer([100, 3000])
    engine = engine_of(optimizer)
    for seed in range(6):
        for _ in range(1 + seed % 2):  # every second step is rerun
            engine.begin_pass()
            engine.release()
            engine.reload()
        if seed % 3 == 2:  # a skipped step: nothing waits, and the next pass comes
            continue
        engine.require_writable()
        step(optimizer, seed)
        step(resident, seed)
    engine.require_readable()
    for mine, theirs in zip(
        optimizer.shard_fp32_from_float16_groups[0], resident.shard_fp32_from_float16_groups[0], strict=True
    ):
        assert torch.equal(mine, theirs)


def test_moments_from_a_checkpoint_go_in_the_first_forward(optimizer):
    # Upstream counts moments as made only after a step of this process.
    step(optimizer, 0)
    engine = engine_of(optimizer)
    engine.begin_pass()
    assert "mark" in optimizer.events
    before = live_bytes(bundles(optimizer), home_device(optimizer))
    engine.release()
    assert engine.traffic.released == engine.traffic.most_released == before > 0
    assert live_bytes(bundles(optimizer), home_device(optimizer)) == 0


def test_moments_that_do_not_exist_are_not_marked(optimizer):
    engine_of(optimizer).begin_pass()
    assert optimizer.events == ["offload"]


def test_bytes_and_pinned_memory_are_counted(optimizer):
    engine = engine_of(optimizer)
    engine.begin_pass()
    engine.release()
    traffic = engine.traffic
    assert traffic.released == 4 * 3100
    engine.reload()
    assert traffic.out == traffic.back == traffic.most_released == 4 * 3100
    assert traffic.released == 0
    assert engine.pinned_bytes == 512 + 16384


def enter(context):
    with context:
        pass


WRITERS = {
    "the optimizer step": lambda engine, source: enter(engine.stepping(source)),
    "a checkpoint's load": lambda engine, source: enter(engine.overwriting_masters(source)),
    "the end of the session": lambda engine, source: engine.close(),
}
READERS = {
    "a save": lambda engine, source: enter(engine.saving(source, copies=True)),
    "a state that is handed out": lambda engine, source: engine.hand_out(source, None, dict),
    "the copy to the model": lambda engine, source: engine.write_back(source, lambda: None),
    "the end of the training step": lambda engine, source: engine.settle(),
}


@pytest.mark.parametrize("who", [*READERS, *WRITERS])
@pytest.mark.parametrize("reloads", [False, True])
def test_whoever_needs_the_states_in_mid_pass_waits_for_them(optimizer, who, reloads):
    engine = engine_of(optimizer)
    engine.begin_pass()
    engine.release()
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


def test_of_two_optimizers_a_writer_brings_back_its_own():
    both = FakeGeneration1(), FakeGeneration1()
    engine = engine_of(*both)
    engine.begin_pass()
    engine.release()
    engine.require_writable(engine.sources[1])
    assert [each.events for each in both] == [["offload", "release"], ["offload", "release", "reload", "wait"]]
    assert engine.traffic.most_released == 2 * 4 * 3100
    assert engine.traffic.released == 4 * 3100
    engine.require_writable()
    assert both[0].events == both[1].events
    assert engine.traffic.released == 0


def test_the_most_that_was_released_is_that_of_the_newest_pass(optimizer):
    engine = engine_of(optimizer)
    for _ in range(2):  # the moments are made by the step between them
        engine.begin_pass()
        engine.release()
        engine.reload()
        engine.require_writable()
        step(optimizer, 0)
    assert engine.traffic.most_released == 3 * 4 * 3100
    engine.begin_pass()
    assert engine.traffic.most_released == 0
    engine.release()
    engine.release()
    assert engine.traffic.most_released == engine.traffic.released == 3 * 4 * 3100


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
    assert engine.state_bytes == engine.planned_bytes == 2 * 3 * 4 * 3100
    assert engine.has_states() and engine.resident_note() == ""
    assert engine.copied_for_a_save() == []
    empty = engine_of()
    for verb in (empty.begin_pass, empty.release, empty.reload, empty.settle, empty.require_writable, empty.close):
        verb()
    assert (empty.state_bytes, empty.pinned_bytes, empty.has_states(), empty.is_lost) == (0, 0, False, False)
