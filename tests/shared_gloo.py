"""Process groups of one process that share one network thread, so that hundreds of trainings take turns in it.

Each gloo group has a thread that wakes a hundred times a second for as long as the group lives, a training makes 30
groups, and mixtures of experts keep theirs: an autograd graph that mcore's dispatcher holds refers to the model.
"""

from datetime import timedelta
from functools import cache

from torch.distributed import distributed_c10d

Gloo = distributed_c10d.ProcessGroupGloo


@cache
def device():
    """The network thread, made for the first group."""
    return Gloo.create_default_device()


class OneThreadForAll(Gloo):
    """A group as torch.distributed makes it, but for the thread."""

    def __init__(self, store, rank: int, size: int, timeout: timedelta, **settings) -> None:
        options = Gloo._Options()
        for name, value in {"_devices": [device()], "_threads": 1, "_timeout": timeout, **settings}.items():
            assert hasattr(options, name), name
            setattr(options, name, value)
        super().__init__(store, rank, size, options)


def have_torch_take_it(set_attribute) -> None:
    """From now on groups of torch.distributed are made so. set_attribute: a monkeypatch's."""
    set_attribute(distributed_c10d, "ProcessGroupGloo", OneThreadForAll)
