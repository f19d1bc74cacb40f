"""Checkpoint workers of mcore and NVRx, which write in processes of their own: they release what they have copied.

A worker gets handles of the trainer's GPU memory (CUDA IPC), copies from them, and writes. mcore's worker keeps the
handles while it writes. NVRx's keeps them until it ends if a checkpoint's structure is constant
(`ckpt_assume_constant_structure`): a later save only says that the tensors are the same. But a tensor that was off the
GPU in between has other memory: the worker would write the old memory, which the driver cannot take back either.
"""

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from bridge_fgo.sleep.caches import of_module
from bridge_fgo.states.shadowed import replaced

_NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt"

_QUEUES = ("megatron.core.dist_checkpointing.strategies.async_utils", f"{_NVRX}.core")
"""Modules of `AsyncCallsQueue`, which hands a worker what it is to do."""

_CACHES = (
    (f"{_NVRX}.filesystem_async", "FileSystemWriterAsync", "cleanup_tensor_caches"),
    (f"{_NVRX}.core", "PersistentAsyncCaller", "cleanup_worker_data_cache"),
)
"""Caches of NVRx's that a trainer and its worker keep of each other: module, class, and the method that clears it."""

_movers = weakref.WeakSet[Any]()
_undo: dict[Any, Callable[[], None]] = {}  # by the class whose method is wrapped


class Staging:
    """Copies the tensors that a worker is to write, when the worker calls it; afterwards the worker has no handle."""

    def __init__(self, copy: Callable[[], Any]) -> None:
        self._copy = copy

    def __call__(self) -> Any:
        """Return the copies."""
        try:
            return self._copy()
        finally:
            del self._copy  # the worker keeps this object while it writes
            forget_sent()


def forget_sent() -> None:
    """Forget, in a trainer or a worker, which tensors the one has sent to the other."""
    for module, cls, method in _CACHES:
        if (owner := of_module(module, cls)) is not None:
            getattr(owner, method)()


def let_go_for(mover: Any) -> None:
    """Make workers release what they have copied, as long as `mover` lives, or until `stop_for`."""
    forget_sent()
    _movers.add(mover)
    for module in _QUEUES:
        queue = of_module(module, "AsyncCallsQueue")
        if queue is not None and queue not in _undo:
            _wrap(queue)


def stop_for(mover: Any) -> None:
    """Undo `let_go_for`."""
    _movers.discard(mover)
    while _undo and not _movers:
        _undo.popitem()[1]()


def _wrap(queue: Any) -> None:
    schedule = queue.schedule_async_request

    @wraps(schedule)
    def scheduled(self: Any, async_request: Any) -> Any:
        copy = getattr(async_request, "preload_fn", None)
        has_gpu_memory = not getattr(self, "cpu_shm_mode", False)
        if copy is None or not has_gpu_memory or not _movers:
            return schedule(self, async_request)
        arguments = list(async_request.async_fn_args)
        arguments[1] = None  # the worker puts its copies here; mcore leaves what they are made of
        try:
            return schedule(self, async_request._replace(preload_fn=Staging(copy), async_fn_args=arguments))
        finally:
            forget_sent()

    _undo[queue] = replaced(queue, "schedule_async_request", scheduled)
