"""How much memory of the device a piece of code holds at once, on a CPU that is device and host alike."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bridge_fgo.memory.state import local

WRITES = ("copy_", "set_scaled_state")
"""What follows at once where a storage that was emptied is filled anew, which no function of torch's tells."""


class StorageMeter(TorchFunctionMode):
    """Counts the bytes of live storages that were made on the device inside the block, or emptied before it.

    A tensor is on the host where it is made with `device="cpu"` or without a device, and where it comes of tensors that
    are. All others are on the device, which is the CPU here: the stand-ins and the slabs name it by an object. Of a
    DTensor the local shard counts.

    Args:
        known: tensors on the device that are there for good, and do not count.
        released: tensors whose storages are empty, and count once they are not.
    """

    def __init__(self, known, released=()):
        super().__init__()
        self.peak = 0
        self._on_device = {}
        self._counted = {}
        self._kept = [tensor.untyped_storage() for tensor in known]  # an address must not be another's later
        self._on_device |= {storage._cdata: True for storage in self._kept}
        for tensor in released:
            self._count(tensor.untyped_storage())

    def _count(self, storage):
        self._on_device[storage._cdata] = True
        self._counted[storage._cdata] = StorageWeakRef(storage)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        changed = getattr(func, "__name__", "") in WRITES
        for leaf in tree_leaves(result):
            tensor = local(leaf)
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._on_device:
                    changed = True
                    if self._is_made_on_device(args, kwargs):
                        self._count(storage)
                    else:
                        self._on_device[storage._cdata] = False
                        self._kept.append(StorageWeakRef(storage))  # so that its address is no other's later
        if changed:
            self.look()
        return result

    def _is_made_on_device(self, args, kwargs):
        if "device" in kwargs:
            return kwargs["device"] is not None and not isinstance(kwargs["device"], str)
        of = [local(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        return any(self._on_device.get(one.untyped_storage()._cdata, False) for one in of)

    def look(self):
        """Take what is there now into account; return its bytes."""
        held = 0
        for address, reference in list(self._counted.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._counted[address], self._on_device[address]
            else:
                held += storage.nbytes()
        self.peak = max(self.peak, held)
        return held
