"""The persistent checkpoint workers of mcore and of NVRx, in a process that has no GPU."""

import errno
import functools
import importlib
import os
import signal

import children
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


def have_bridge_use(worker, set_attribute, quickly=False, loop=None):
    """Have Bridge's persistent workers be such that run without a GPU; return a list that gets their processes.

    worker: "mcore" or "nvrx".
    quickly: they are forked from a process that has everything imported, where Bridge spawns them (mcore's only).
    loop: what they run; the stand-in above where None.
    """
    cls, started = worker_class(worker), []
    name, stand_in = LOOPS[worker]
    set_attribute(cls, name, staticmethod(loop or stand_in))
    if quickly:
        children.context()
        start = cls._get_process

        def get_process(rank, mode="", *args, **kwargs):
            process = start(rank, "forkserver", *args, **kwargs)
            started.extend([process] * (process not in started))
            return process

        set_attribute(cls, "_get_process", get_process)
    return started


class DiskFull(OSError):
    """What a write that fails raises."""


def break_the_writing(of, how, set_attribute=setattr):
    """Have the second item of a file not be written, in this process and those that are forked from it.

    of: a part of the file's path.
    how: "killed", the process is; or "failed", the write raises.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    original = filesystem_async._write_item
    seen = 0

    @functools.wraps(original)  # mcore asks for its signature
    def broken(transforms, stream, *args, **kwargs):
        nonlocal seen
        seen += of in stream.name
        if of in stream.name and seen == 2:
            if how == "killed":
                stream.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            raise DiskFull(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(transforms, stream, *args, **kwargs)

    set_attribute(filesystem_async, "_write_item", broken)


def broken_mcore_loop(of, how, *args):
    """Stand for mcore's loop, in which a file is not written."""
    break_the_writing(of, how)
    mcore_loop(*args)
