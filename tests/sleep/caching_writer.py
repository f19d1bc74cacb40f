"""NVRx's background writer with a constant structure, and CUDA IPC, as far as they can be had without a GPU.

The classes that a trainer meets have NVRx's names and do what its do (0.6): the trainer sends handles of what is on the
GPU once, and then their key; the worker keeps them. All tensors here count as on the GPU. A handle gives the memory
that its tensor had when it was sent, also once the tensor has other memory.
"""

import contextlib
import io
import pickle
import sys
import types
import weakref
from collections.abc import MutableMapping, MutableSet
from functools import partial
from typing import ClassVar

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from spies import before

from bridge_fgo.memory.slab import Slab
from bridge_fgo.memory.storage_slab import StorageSlab

PACKAGE = "nvidia_resiliency_ext.checkpointing.async_ckpt"


class Block:
    """The memory of a storage from when it was sent until it goes."""

    of: ClassVar[MutableMapping[int, "Block"]] = weakref.WeakValueDictionary()
    """By the storage; those that somebody has a handle of."""
    gone: ClassVar[MutableSet["Block"]] = weakref.WeakSet()
    """Those whose storage was emptied, and which cannot be freed."""

    def __init__(self, storage):
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
        Block.of[storage._cdata] = self

    @staticmethod
    def leaves(storage):
        """Note that a storage is about to be emptied."""
        if (block := Block.of.pop(storage._cdata, None)) is not None:
            block.bytes = block.bytes.clone()
            Block.gone.add(block)

    @staticmethod
    def taken():
        """Return the bytes that are taken although their storages are empty."""
        return sum(block.bytes.numel() for block in Block.gone)


class Handle:
    """What another process has of a tensor."""

    def __init__(self, tensor):
        storage = tensor.untyped_storage()
        self.block = Block.of.get(storage._cdata) or Block(storage)
        self.place = tensor.storage_offset() * tensor.itemsize, tensor.nbytes
        self.dtype, self.shape = tensor.dtype, tensor.shape

    def copy(self):
        """Return what is in the memory now."""
        start, nbytes = self.place
        return self.block.bytes[start : start + nbytes].clone().view(self.dtype).view(self.shape)


def sent(thing):
    """Return what a worker makes of something that is pickled to it."""
    tensors, file = [], io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.persistent_id = lambda part: (
        tensors.append(part) or len(tensors) - 1 if isinstance(part, torch.Tensor) else None
    )
    pickler.dump(thing)
    unpickler = pickle.Unpickler(io.BytesIO(file.getvalue()))
    unpickler.persistent_load = lambda place: Handle(tensors[place])
    return unpickler.load()


class PersistentAsyncCaller:
    """A worker's class."""

    _worker_data_cache: ClassVar[dict] = {}

    @classmethod
    def cleanup_worker_data_cache(cls):
        cls._worker_data_cache.clear()


class FileSystemWriterAsync:
    """A trainer's class."""

    _cached_identifiers: ClassVar[set] = set()

    def __init__(self, use_cached_data_structure):
        self.use_cached_data_structure = use_cached_data_structure

    def request(self, tensors, written):
        """Return a save's request: tensors by name, and where they are written to."""
        key, data = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()), tensors
        if not self.use_cached_data_structure:
            key = None
        elif key in self._cached_identifiers:
            data = None
        else:
            self._cached_identifiers.add(key)
        stage = partial(self.preload_tensors, (key, data), True)
        return AsyncRequest(partial(self.write, written), [0, None], [], {}, stage)

    @classmethod
    def cleanup_tensor_caches(cls):
        cls._cached_identifiers.clear()

    @staticmethod
    def preload_tensors(resolved, non_blocking):
        key, data = resolved
        cache = PersistentAsyncCaller._worker_data_cache
        if key is not None:
            if data is None:
                data = cache[key]
            cache[key] = data
        return {name: handle.copy() for name, handle in data.items()}

    @staticmethod
    def write(written, rank, tensors):
        LOOK_UP[written].append(tensors)


LOOK_UP: dict[str, list] = {}
"""What was written, by the name of a run."""


class AsyncCallsQueue:
    """A trainer's queue to its worker, which is another process: it has class attributes of its own."""

    cpu_shm_mode = False

    def __init__(self):
        self.cache = {}
        self.writing = None

    @contextlib.contextmanager
    def in_worker(self):
        identifiers = FileSystemWriterAsync._cached_identifiers
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PersistentAsyncCaller, "_worker_data_cache", self.cache)
            patch.setattr(FileSystemWriterAsync, "_cached_identifiers", set())
            yield
        assert FileSystemWriterAsync._cached_identifiers is identifiers

    def schedule_async_request(self, async_request):
        self.finish()
        item = sent(async_request)
        with self.in_worker():
            arguments = list(item.async_fn_args)
            arguments[1] = item.preload_fn()
        self.writing = item, arguments

    def finish(self):
        """Have the worker write; until then it has what it was given."""
        if self.writing is not None:
            item, arguments = self.writing
            item.async_fn(*arguments)
        self.writing = None


@pytest.fixture
def caching_writer(monkeypatch):
    """NVRx's modules are these; memory stays as long as there are handles of it. Returns a list of what is written."""
    for part, names in {
        "core": (AsyncCallsQueue, PersistentAsyncCaller),
        "filesystem_async": (FileSystemWriterAsync,),
    }.items():
        module = types.ModuleType(f"{PACKAGE}.{part}")
        for cls in names:
            setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    before(monkeypatch, StorageSlab, "empty", lambda slab: Block.leaves(slab.storage))
    before(monkeypatch, Slab, "_free", lambda slab: Block.leaves(slab._storage))
    LOOK_UP["run"] = []
    yield LOOK_UP["run"]
    FileSystemWriterAsync._cached_identifiers.clear()
