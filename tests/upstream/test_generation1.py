"""The adapter of generation 1: upstream's verbs in the right states, and the waits that upstream leaves out.

The fake has upstream's surface and its flaw: a reload counts as done as soon as it is started, and only
`sync_before_step` makes it so.
"""

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, step

from bridge_fgo.engine.states import bundles, home_device, live_bytes
from bridge_fgo.upstream.generation1 import Generation1Offloader, is_available


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


def test_it_is_found_by_its_verbs():
    assert is_available(FakeGeneration1)
    assert not is_available(torch.optim.AdamW)


def test_a_second_pass_waits_before_it_copies_out(optimizer):
    offloader = Generation1Offloader(optimizer)
    for _ in range(2):
        offloader.offload()
        offloader.release()
        offloader.reload()
    assert optimizer.events == ["offload", "release", "reload", "wait", "offload", "release", "reload"]


def test_bits_survive_reruns_skips_and_early_reads(optimizer):
    resident = make_distributed_optimizer([100, 3000])
    offloader = Generation1Offloader(optimizer)
    for seed in range(6):
        for _ in range(1 + seed % 2):  # every second step is rerun
            offloader.offload()
            offloader.release()
            offloader.reload()
        if seed % 3 == 2:  # a skipped step: nothing waits, and the next pass comes
            continue
        offloader.require_writable()
        step(optimizer, seed)
        step(resident, seed)
    offloader.require_readable()
    for mine, theirs in zip(
        optimizer.shard_fp32_from_float16_groups[0], resident.shard_fp32_from_float16_groups[0], strict=True
    ):
        assert torch.equal(mine, theirs)


def test_moments_from_a_checkpoint_go_in_the_first_forward(optimizer):
    # Upstream counts moments as made only after a step of this process.
    step(optimizer, 0)
    offloader = Generation1Offloader(optimizer)
    offloader.offload()
    assert "mark" in optimizer.events
    before = live_bytes(bundles(optimizer), home_device(optimizer))
    offloader.release()
    assert offloader.released_bytes == before > 0
    assert live_bytes(bundles(optimizer), home_device(optimizer)) == 0


def test_moments_that_do_not_exist_are_not_marked(optimizer):
    Generation1Offloader(optimizer).offload()
    assert optimizer.events == ["offload"]


def test_bytes_and_pinned_memory_are_counted(optimizer):
    offloader = Generation1Offloader(optimizer)
    offloader.offload()
    offloader.release()
    freed = offloader.released_bytes
    offloader.reload()
    assert offloader.bytes_out == offloader.bytes_in == freed == 4 * 3100
    assert offloader.pinned_bytes == 512 + 16384


def enter(context):
    with context:
        pass


WRITERS = {
    "the optimizer step": lambda offloader: enter(offloader.stepping()),
    "a checkpoint's load": lambda offloader: enter(offloader.overwriting_masters()),
    "the end of the session": lambda offloader: offloader.close(),
}
READERS = {
    "a save": lambda offloader: enter(offloader.saving(copies=True)),
    "a state that is handed out": lambda offloader: offloader.hand_out(None, dict),
    "the copy to the model": lambda offloader: offloader.copy_masters(lambda: None),
    "the end of the training step": lambda offloader: offloader.settle(),
}


@pytest.mark.parametrize("who", [*READERS, *WRITERS])
@pytest.mark.parametrize("reloads", [False, True])
def test_whoever_needs_the_states_in_mid_pass_waits_for_them(optimizer, who, reloads):
    offloader = Generation1Offloader(optimizer)
    offloader.offload()
    offloader.release()
    if reloads:
        offloader.reload()
    (READERS | WRITERS)[who](offloader)
    assert optimizer.events == ["offload", "release", "reload", "wait"]


@pytest.mark.parametrize("who", WRITERS)
def test_states_that_were_written_on_their_way_out_are_not_released(optimizer, who):
    offloader = Generation1Offloader(optimizer)
    offloader.offload()
    WRITERS[who](offloader)
    offloader.release()
    assert optimizer.events == ["offload"]
