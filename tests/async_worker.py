"""The persistent checkpoint workers of mcore and of NVRx, in a process that has no GPU."""

import importlib

import torch


def worker_class(strategy):
    """Return the class of the worker for Bridge's `checkpoint.async_strategy`."""
    modules = {
        "mcore": "megatron.core.dist_checkpointing.strategies.async_utils",
        "nvrx": "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
    }
    return importlib.import_module(modules[strategy]).PersistentAsyncCaller


def mcore_loop(*args):
    """Stand for mcore's loop, which chooses a CUDA device and waits for it."""
    loop = worker_class("mcore").async_loop  # the original: the test replaced it in its own process only
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = torch.cuda.synchronize = lambda *args: None
    loop(*args)


def nvrx_loop(*args):
    """Stand for NVRx's loop, which makes a CUDA context unless its last argument is true."""
    loop = worker_class("nvrx").async_process_target
    torch.cuda.synchronize = lambda *args: None
    loop(*args[:-1], True)


LOOPS = {"mcore": ("async_loop", mcore_loop), "nvrx": ("async_loop_for_daemon_worker", nvrx_loop)}
