"""A host beside the device, where CUDA stands in on a CPU: by `cpu()` a tensor leaves, and by `cuda()` it comes back.

The stand-ins of `tools.standins` have one memory for both, so that what mcore sends to the CPU is where it was.
"""

import torch


class TwoDevices:
    """Has `Tensor.cpu` copy to "the host" and `Tensor.cuda` copy from it. patch: a MonkeyPatch."""

    def __init__(self, patch):
        self._copies = []  # keeps the host's memory, whose addresses are never used again
        self.at_host = set()  # addresses of storages on the host
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: not self._is_at_host(tensor)))
        patch.setattr(torch.Tensor, "cpu", lambda tensor: self._to_host(tensor))
        patch.setattr(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: self._to_device(tensor))

    def _is_at_host(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.at_host

    def _to_host(self, tensor):
        copy = tensor.detach().clone()
        self._copies.append(copy)
        self.at_host.add(copy.untyped_storage().data_ptr())
        return copy

    def _to_device(self, tensor):
        return tensor.detach().clone() if self._is_at_host(tensor) else tensor
