"""Background saves of a trainer that sleeps have their step's bytes."""

import queue
import threading
import weakref
from functools import partial

import pytest
import torch
from caching_writer import AsyncCallsQueue, Block, FileSystemWriterAsync

from bridge_fgo.sleep import checkpoint_workers

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")


def tensors_of(training):
    """Return all weights, masters and moments, by name."""
    found = {
        f"{i}.{name}": param.data for i, ddp in enumerate(training.model) for name, param in ddp.named_parameters()
    }
    for i, leaf in enumerate(training.optimizer.chained_optimizers):
        params = [param for group in leaf.optimizer.param_groups for param in group["params"]]
        for k, param in enumerate(params):
            found[f"{i}.{k}"] = param.data
            found |= {f"{i}.{k}.{name}": value for name, value in leaf.optimizer.state[param].items() if value.dim()}
    return found


class Saves:
    """Saves a training in the background, and holds what is written against what was to be saved."""

    def __init__(self, training, written, constant_structure):
        self.training, self.written, self.constant = training, written, constant_structure
        self.queue, self.expected = AsyncCallsQueue(), []

    def save(self):
        tensors = tensors_of(self.training)
        self.expected.append({name: tensor.clone() for name, tensor in tensors.items()})
        self.queue.schedule_async_request(FileSystemWriterAsync(self.constant).request(tensors, "run"))

    def stale(self):
        """Return which tensors of each save are not what they were in its step."""
        self.queue.finish()
        assert len(self.written) == len(self.expected) > 0
        return [
            [name for name in expected if not torch.equal(expected[name], saved[name])]
            for saved, expected in zip(self.written, self.expected, strict=True)
        ]


@pytest.mark.parametrize("constant_structure", [False, True], ids=["", "constant structure"])
@pytest.mark.parametrize("early", [True, False], ids=["Residency", "late Residency"])
def test_each_save_has_the_bytes_of_its_step_and_no_memory_stays_while_it_is_written(
    installed, sleeper, caching_writer, constant_structure, early
):
    taken, me = [], sleeper(0, early=early)
    saves = Saves(me.training, caching_writer, constant_structure)
    for step in range(9):
        me.train()
        if step % 3 == 0:
            saves.save()
        me.res.offload()
        taken.append(Block.taken())
        me.res.reload()
    assert saves.stale() == [[], [], []]
    assert taken == [0] * 9 or not early, "what was sent before there was a Residency stays until the next save"


def test_nvrx_sends_handles_once_where_nothing_moves(sleeper, monkeypatch, caching_writer):
    monkeypatch.setattr(checkpoint_workers, "_movers", weakref.WeakSet())  # other tests' models may live
    me = sleeper(0)
    me.res.close()
    saves = Saves(me.training, caching_writer, constant_structure=True)
    for _ in range(2):
        me.train()
        saves.save()
    assert saves.stale() == [[], []] and FileSystemWriterAsync._cached_identifiers


# mcore's own worker.

STAGED: list[weakref.ref] = []
HELD: list[int] = []
MAY_WRITE = threading.Event()


def stage(tensors, non_blocking):
    STAGED.extend(weakref.ref(tensor) for tensor in tensors)
    return [tensor.clone() for tensor in tensors]


def write(rank, copies, results):
    MAY_WRITE.wait(60)
    HELD.append(sum(tensor() is not None for tensor in STAGED))
    results.append(len(copies))


def test_mcores_worker_has_no_handle_while_it_writes(sleeper, monkeypatch):
    from megatron.core.dist_checkpointing.strategies import async_utils

    to_do, staging, done, results = queue.Queue(), queue.Queue(), queue.Queue(), []
    worker = threading.Thread(
        target=async_utils.PersistentAsyncCaller.async_loop, args=(0, to_do, staging, done), daemon=True
    )
    caller = async_utils.PersistentAsyncCaller()
    monkeypatch.setattr(async_utils, "_set_process_qos", lambda **settings: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name, channel in (("_queue", to_do), ("_preload_q", staging), ("_comp_q", done), ("_process", worker)):
        monkeypatch.setattr(async_utils.PersistentAsyncCaller, f"_persistent{name}", channel)
    calls = async_utils.AsyncCallsQueue(persistent=True)
    monkeypatch.setattr(calls, "_get_async_caller", lambda: caller)
    worker.start()
    res = sleeper(0).res
    tensors = [torch.ones(4), torch.ones(2)]
    calls.schedule_async_request(
        async_utils.AsyncRequest(write, [0, tensors, results], [], {}, partial(stage, tensors, True))
    )
    del tensors
    MAY_WRITE.set()
    assert done.get(timeout=60) == 0
    res.close()
    caller.close()
    worker.join()
    assert (results, HELD) == ([2], [0])
