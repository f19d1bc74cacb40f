"""Shared fixtures of the CPU lane: the real Bridge with Transformer Engine and CUDA standing in."""

import gc
import os
import signal
import sys

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores; torch reads it when it is imported
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # as images set it: each process would compile Megatron, in 20 s
    sys.dont_write_bytecode = False

import debug_transfers  # noqa: F401  (whoever sets its variable has the mode)

import bridge_fgo


def pytest_collection_modifyitems(items):
    """Begin the first half with tests of forked ranks and the second with those of built models.

    Of two workers with `--dist worksteal`, which steal from the end of a half, each then starts one of the processes
    that import Megatron for those, and not both.
    """
    of_ranks, of_models, others = [], [], []
    for item in items:
        names = vars(item.module).values()
        used = {getattr(value, "__module__", getattr(value, "__name__", "")) for value in names}
        forks = not used.isdisjoint({"children", "rank_child", "async_worker"})
        (of_ranks if forks else of_models if item.path.parent.name == "tools" else others).append(item)
    before = max(0, len(items) // 2 - len(of_ranks))
    items[:] = of_ranks + others[:before] + of_models + others[before:]


def pytest_unconfigure():
    """Unfreeze what `cpu_standins` froze: what is left at the end of the process would be told of as leaked."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def builder_is_forked():
    """Models that `plan`, `doctor` and the like have built come from a process that has Megatron imported."""
    from forked import ForkedBuilder

    from bridge_fgo.tools.job import answers

    forked = ForkedBuilder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "subprocess", forked)
        yield forked


@pytest.fixture
def bridge_train(cpu_standins):
    """Bridge's real train module."""
    import megatron.bridge.training.train as module

    return module


@pytest.fixture(scope="module")
def cpu_standins():
    """Bridge runs on the CPU for the tests of a module."""
    import shared_gloo
    import torch

    from bridge_fgo.tools.standins.cuda import install_standins, remove_standins

    install_standins()
    torch.set_num_threads(1)  # where cores are busy, threads that wait for each other take ten times as long
    gc.collect()
    # What is imported need not be looked through for garbage in every test, nor again before the next module: it stays.
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        shared_gloo.have_torch_take_it(patch.setattr)
        yield
    remove_standins()


@pytest.fixture(scope="module")
def fused_adam_in_mcore(cpu_standins):
    """mcore trains with a stand-in of Transformer Engine's FusedAdam, for the tests of a module."""
    import fused_adam

    with pytest.MonkeyPatch.context() as patch:
        fused_adam.have_mcore_take_it(patch.setattr)
        yield


@pytest.fixture
def installed(cpu_standins):
    """The package installed for one test, with the native engine."""
    with bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native")) as handle:
        yield handle


@pytest.fixture(scope="module", autouse=True)
def leaves_no_environment():
    """Take back what a module's models set in the environment (mcore's NVTE_*_ATTN), which would reach the next one."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def leaves_nothing_installed():
    """Fail a test that leaves the package installed, and clean up for the next."""
    yield
    from bridge_fgo.bridge import installation

    left = installation._installation
    try:
        bridge_fgo.uninstall()
    except RuntimeError:  # states that cannot be brought back must not have later tests run patched
        left.undo()
        installation._installation = None
        raise
    assert left is None, "the test left bridge_fgo installed"


@pytest.fixture
def deadline():
    """Fail the test after some minutes: a worker that died would be waited for without end."""
    from forked import PATIENCE

    def late(*_):
        raise TimeoutError("the checkpoint worker did not answer")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
