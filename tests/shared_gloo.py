"""Gloo groups of one process that share one network thread, so that hundreds of trainings take turns in it.

Each gloo group has a thread that wakes a hundred times a second for as long as the group lives, a training makes 30
groups, and mixtures of experts keep theirs: an autograd graph that mcore's dispatcher holds refers to the model.
"""

from functools import cache

from torch.distributed.distributed_c10d import ProcessGroupGloo

device = cache(ProcessGroupGloo.create_default_device)  # returns the network thread, made for the first group


def have_torch_take_it(set_attribute) -> None:
    """From now on the stand-ins make groups with it. set_attribute: a monkeypatch's."""
    set_attribute(ProcessGroupGloo, "create_default_device", device)
