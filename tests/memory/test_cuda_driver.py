"""What the CUDA driver and NVRTC refuse is an error, without either."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from bridge_fgo.memory import cuda_driver


class Refuses:
    """A driver of which every function fails but those named."""

    def __init__(self, *works):
        self._works = works

    def __getattr__(self, name):
        return lambda *args: 0 if name in self._works else 719


KERNEL, EVENT = ("cuModuleGetFunction",), ("cuEventCreate", "cuEventDestroy_v2")
CALLS = {
    "copy": ((), lambda: cuda_driver.Copier(to_gpu=False).copy(1, 2, 3, 0)),
    "make a stream": ((), cuda_driver.Stream),
    "make an event": ((), cuda_driver.Event),
    "find k": ((), lambda: cuda_driver.Kernel(SimpleNamespace(handle=1), "k", [1, 2], 32)),
    "launch": (
        KERNEL,
        lambda: cuda_driver.Kernel(SimpleNamespace(handle=1), "k", [1, 2], 32).launch(
            cuda_driver.make_grid(1, 1), 0, 5
        ),
    ),
    "query": (EVENT, lambda: cuda_driver.Event().has_happened()),
    "record": (EVENT, lambda: cuda_driver.Event().record(0)),
    "wait": (EVENT, lambda: cuda_driver.Event().block(0)),
}
"""By what the error says: the driver's functions that succeed, and a call that needs one that fails."""


@pytest.mark.parametrize("what", CALLS)
def test_what_the_driver_refuses_is_an_error(monkeypatch, what):
    works, call = CALLS[what]
    library = Refuses(*works)
    monkeypatch.setattr(cuda_driver, "_library", lambda: library)
    with pytest.raises(RuntimeError, match=rf"refused to {what}.*719"):
        call()


def test_a_stream_is_destroyed_with_its_owner_but_not_at_exit(monkeypatch):
    # The context may be gone by then.
    destroyed, made, finalize = [], [], weakref.finalize
    library = SimpleNamespace(cuStreamCreate=lambda stream, flags: 0, cuStreamDestroy_v2=destroyed.append)
    monkeypatch.setattr(cuda_driver, "_library", lambda: library)
    monkeypatch.setattr(weakref, "finalize", lambda *of: made.append(finalize(*of)) or made[-1])
    stream = cuda_driver.Stream()
    assert [one.atexit for one in made] == [False] and not destroyed
    handle = stream.handle
    del stream
    assert destroyed == [handle]


def test_what_nvrtc_says_of_a_source_is_in_the_error():
    def tell_size(program, found):
        found._obj.value = 7
        return 0

    def tell(program, buffer):
        buffer.value = b"line 3"
        return 0

    library = SimpleNamespace(
        nvrtcCreateProgram=lambda *args: 0, nvrtcCompileProgram=lambda *args: 6, nvrtcGetProgramLogSize=tell_size,
        nvrtcGetProgramLog=tell, nvrtcDestroyProgram=lambda *args: 0, nvrtcGetCUBINSize=tell_size,
        nvrtcGetCUBIN=lambda *args: 0,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"\(6\): line 3"):
        cuda_driver.compile_source(library, "source", "sm_90")


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_an_nvrtc_that_is_not_there_or_too_old_leaves_it_to_the_next_and_the_last_to_torch(monkeypatch, error):
    def fails(*args):
        raise error("too old")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_driver, "_candidates", lambda: ["old", "new"])
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda path: path)
    monkeypatch.setattr(cuda_driver, "compile_source", lambda library, *args: fails() if library == "old" else b"code")
    monkeypatch.setattr(cuda_driver, "Module", lambda code: code)
    assert cuda_driver.compile_for(f"one of {error.__name__}", torch.device("cpu")) == b"code"
    monkeypatch.setattr(cuda_driver, "compile_source", fails)
    assert cuda_driver.compile_for(f"another of {error.__name__}", torch.device("cpu")) is None
