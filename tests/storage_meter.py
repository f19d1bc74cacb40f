"""How much memory of the device a piece of code holds at once, on a CPU that is device and host alike."""

import contextlib

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bridge_fgo.bridge.session import all_sessions
from bridge_fgo.memory.state_tensor import local
from bridge_fgo.states.fsdp import is_fsdp, parameter_groups
from harness.arms.final_state import mcore_optimizers

SMALL = {"layers": 6, "hidden": 64}
"""Options of a model of which no two parts are a third of the states."""
PART_BYTES = 64 * 1024
"""What `memory.layout.LEAST_PART_BYTES` should be for that."""
SCALARS = 4 * 1024
"""Bytes for counts, sums and norms."""

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


def engine():
    """The engine of the one session there is."""
    (session,) = all_sessions()
    return session.engine


def two_parts():
    """Most bytes of states that building or loading may have on the device."""
    return 2 * max(part.nbytes for part in engine().schedule.parts) + SCALARS


def masters(run):
    """Every master that mcore keeps, in an order of its own."""
    places = ("fp32_from_float16_groups", "shard_fp32_from_float16_groups")
    groups = [vars(leaf).get(name, ()) for leaf in mcore_optimizers(run.optimizer) for name in places]
    return [master for of_leaf in groups for group in of_leaf for master in group]


def weights_and_gradients(model):
    """What mcore's DDP has on the device: parameters, and the memory of its buffers."""
    found = [parameter for chunk in model for parameter in chunk.parameters()]
    buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    memory = [tensor for buffer in buffers for tensor in (buffer.param_data, buffer.grad_data)]
    return found + [tensor for tensor in memory if tensor is not None]  # only a DistributedOptimizer has parameters


@contextlib.contextmanager
def metered(run):
    """Context in which the most bytes of states on the device, and of what is made beside them, are counted."""
    leaves = list(mcore_optimizers(run.optimizer))
    states = [value for leaf in leaves for of_param in leaf.optimizer.state.values() for value in of_param.values()]
    states = [local(value) for value in states if isinstance(value, torch.Tensor)]
    if is_fsdp(leaves[0]):
        known = []
        for name, value in [
            item for leaf in leaves for group in parameter_groups(leaf) for item in vars(group).items()
        ]:
            data = getattr(value, "data", None)
            if not isinstance(value, torch.Tensor) and isinstance(data, torch.Tensor):
                (states if name == "main_weight_buffer" else known).append(data)
        of_states = {tensor.untyped_storage()._cdata for tensor in states}
        weights = [local(parameter) for chunk in run.model for parameter in chunk.parameters()]
        known += [weight for weight in weights if weight.untyped_storage()._cdata not in of_states]
    else:
        known = weights_and_gradients(run.model)
        states += [master for master in masters(run) if master is not None]
    with StorageMeter(known, states) as meter:
        meter.look()
        yield meter
