"""Page-locking by CUDA's driver, mocked: what is locked, what is unlocked, and what a refusal says."""

import gc
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from bridge_fgo.memory import cuda_driver, host_buffer
from bridge_fgo.memory.host_buffer import HostBuffer, page_lock

OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


@pytest.fixture
def locked(monkeypatch):
    """A driver that locks at most three buffers; returns the addresses that are locked, with their bytes."""
    locked = {}

    def register(address, nbytes, flags):
        if len(locked) == 3:
            return OUT_OF_MEMORY
        locked[address] = nbytes
        return 0

    library = SimpleNamespace(cuMemHostRegister_v2=register, cuMemHostUnregister=locked.pop)
    monkeypatch.setattr(cuda_driver, "_library", lambda: library)
    monkeypatch.setattr(host_buffer, "PINNING_THREADS", 1)
    monkeypatch.setattr(host_buffer, "local_cpus", lambda device: {5})
    monkeypatch.setattr(host_buffer.os, "sched_setaffinity", lambda process, chosen: None)
    for name in ("current_device", "set_device", "synchronize", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: 0)
    return locked


def test_buffers_are_locked_to_the_byte_unlocked_when_they_go_and_at_exit_left_to_the_driver(locked):
    buffers = [HostBuffer(10_000), HostBuffer(5_000)]
    page_lock(buffers)
    assert sorted(locked.values()) == [5_000, 10_000] == sorted(buffer.pinned_bytes for buffer in buffers)
    buffers.pop().close()
    assert list(locked.values()) == [10_000]
    buffers.clear()
    gc.collect()
    assert locked == {}

    buffer = HostBuffer(4096)
    buffer.lock()
    assert buffer._unlock.atexit is False


@pytest.mark.parametrize(
    ("release", "said"),
    [
        ("6.8.0", r"^raise `ulimit -l`.*page-lock 4096 bytes .*CUresult 2.*of 16384 bytes"),
        (
            "5.15.153.1-microsoft-standard-WSL2",
            r"^set OffloadConfig\.pin_memory=False .*WSL.*4096 bytes.*of 16384 bytes",
        ),
    ],
)
def test_a_refusal_says_what_helps_and_the_bytes_asked_for_and_leaves_nothing_locked(
    locked, monkeypatch, release, said
):
    monkeypatch.setattr(host_buffer.platform, "release", lambda: release)
    buffers = [HostBuffer(4096) for _ in range(4)]
    with pytest.raises(RuntimeError, match=said):
        page_lock(buffers)
    assert buffers[3].pinned_bytes == 0
    buffers.clear()
    gc.collect()
    assert locked == {}


def test_a_refusal_leaves_no_error_in_cudas_runtime_which_the_next_kernels_launch_would_raise(locked, monkeypatch):
    errors = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *args: errors.append(OUT_OF_MEMORY) or OUT_OF_MEMORY)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(RuntimeError):
        page_lock([HostBuffer(4096) for _ in range(4)])
    assert not errors


def test_a_host_that_runs_out_of_memory_meanwhile_is_an_error_before_a_page_is_touched(locked, monkeypatch):
    # Other ranks take it at the same time; whoever touches what is not there is killed.
    free = iter([10_000, 5_000, 4_000])
    monkeypatch.setattr(host_buffer, "available_bytes", lambda: next(free))
    buffers = [HostBuffer(4096) for _ in range(3)]
    touched = []
    monkeypatch.setattr(HostBuffer, "lock", lambda buffer: touched.append(buffer) or 0)
    with pytest.raises(
        ValueError, match=r"4000 bytes of memory left after 8192 of 12288 bytes.*OffloadConfig\.fraction"
    ):
        page_lock(buffers)
    assert touched == buffers[:2]


@pytest.mark.parametrize("spare", [0, 1, 5])
def test_what_other_threads_are_touching_is_not_counted_twice(locked, monkeypatch, spare):
    # The host has just room: what is touched is gone from what is free already, before it is registered.
    touched, turn, size = [0], threading.Lock(), 4096
    monkeypatch.setattr(host_buffer, "PINNING_THREADS", 8)
    monkeypatch.setattr(host_buffer, "available_bytes", lambda: (20 + spare) * size - touched[0])

    def lock(buffer):
        with turn:
            touched[0] += size
        time.sleep(0.002)
        return 0

    monkeypatch.setattr(HostBuffer, "lock", lock)
    page_lock([HostBuffer(size) for _ in range(20)])
    assert touched == [20 * size]


def test_what_other_threads_are_about_to_touch_is_not_free(locked, monkeypatch):
    # A page counts once it is touched: two threads must not both be told of the same room.
    size, free, touched = 4096, [6000], []
    monkeypatch.setattr(host_buffer, "PINNING_THREADS", 2)
    monkeypatch.setattr(host_buffer, "available_bytes", lambda: free[0])

    def lock(buffer):
        touched.append(buffer)
        time.sleep(0.05)  # the other thread asks meanwhile
        free[0] -= size
        return 0

    monkeypatch.setattr(HostBuffer, "lock", lock)
    with pytest.raises(ValueError, match="memory left after 4096 of 8192 bytes"):
        page_lock([HostBuffer(size), HostBuffer(size)])
    assert len(touched) == 1


def test_threads_lock_for_the_callers_gpu_from_the_cpus_near_it_and_unlock_when_that_gpu_is_idle(locked, monkeypatch):
    set_to, cpus = [], []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", set_to.append)
    monkeypatch.setattr(host_buffer.os, "sched_setaffinity", lambda process, chosen: cpus.append((process, chosen)))
    page_lock([HostBuffer(4096)])
    assert set(set_to) == {3} and set(map(str, cpus)) == {"(0, {5})"}

    # Python may collect a buffer in a thread whose current GPU is another.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    buffer = HostBuffer(4096)
    page_lock([buffer])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    buffer.close()
    assert waited == [3]
