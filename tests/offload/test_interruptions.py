"""After Ctrl-C at any line of the engine every state is right, or refused."""

import random
import sys
from functools import partial

import pytest
import torch
from fake_training import WHOLE, Training

from bridge_fgo import engines, memory, offload, states
from bridge_fgo.memory.slab import SlabState

RAN_ON = "CPU"

FOLDERS = tuple(package.__path__[0] for package in (memory, offload, engines, states))


class Interruption:
    """Raises KeyboardInterrupt before the n-th line of the engine that runs in the block, which it ends; 0: never.

    A trace function, unlike a signal, can raise before a `with` calls `__exit__`. If that `with` is `own()`, torch
    functions stay disabled in this process, and no guard sees a touch. So they are enabled again at the end.
    """

    def __init__(self, lines):
        self.left = lines
        self.torch_function = torch._C._EnableTorchFunction()

    def __enter__(self):
        self.torch_function.__enter__()
        self.before = sys.gettrace()
        sys.settrace(self._calls)
        return self

    def __exit__(self, kind, error, traceback):
        sys.settrace(self.before)
        self.torch_function.__exit__(kind, error, traceback)
        return kind is KeyboardInterrupt

    def _calls(self, frame, event, argument):
        return self._lines if frame.f_code.co_filename.startswith(FOLDERS) else None

    def _lines(self, frame, event, argument):
        self.left -= event == "line"
        if self.left == 0:
            raise KeyboardInterrupt
        return self._lines


def save(training):
    for source in training.sources:
        training.saved(source)


def interrupted(seed, after=0):
    """Returns a training of four steps that is interrupted in what comes next, and how many lines of that had run."""
    choose = random.Random(seed).choice
    settings = {"optimizers": choose([1, 2]), "master_remainders": choose([True, False])}
    training = Training(choose([0, WHOLE // 10, WHOLE // 4, WHOLE]), choose([0, WHOLE // 2]), **settings)
    training.steps(4)
    if choose([True, False]):
        training.engine.use_worker_memory()
    readers = [partial(training.engine.require_readable, source) for source in training.sources]
    act = choose([training.run_pass, training.schedule.release_everything, lambda: save(training), *readers])
    with Interruption(after) as interruption:
        act()
    return training, after - interruption.left


def require_memory(training):
    """Fails where a slab counts as here and its memory is gone: reading it would end the process."""
    slabs = training.slabs()
    here = [slab for slab in slabs if not slab.interrupted and slab.state is not SlabState.RELEASED]
    assert not [slab.nbytes for slab in here if slab.gpu.untyped_storage().nbytes() != slab.nbytes]


@pytest.mark.parametrize("seed", [*range(24), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(24, 60))])
def test_what_was_interrupted_is_right_or_refused(seed):
    _, lines = interrupted(seed)  # not at all, to count them
    choose = random.Random(seed)
    training, ran = interrupted(seed, after=choose.randrange(1, lines + 1) if lines else 0)
    assert ran <= lines
    require_memory(training)
    afterwards = [training.check, lambda: save(training), lambda: training.steps(2)]
    choose.shuffle(afterwards)
    try:
        for use in afterwards:
            use()
        training.check()
    except RuntimeError as refusal:
        assert "the optimizer state cannot be used: KeyboardInterrupt came" in str(refusal)
