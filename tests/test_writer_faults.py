"""If a background writer dies, the newest named checkpoint is whole."""

import contextlib
import functools
import gc
import time

import async_worker
import children
import pytest
from both import training
from bridge_loop import train
from saving import assert_same_shards, background, configured, newest
from torch.distributed.checkpoint.api import CheckpointException
from torch.multiprocessing.reductions import StorageWeakRef

from bridge_fgo.memory.host_buffer import SharedHostBuffer
from bridge_fgo.offload import snapshot

pytestmark = [pytest.mark.usefixtures("cpu_standins", "deadline"), pytest.mark.slow]

FATES = {
    "killed": ("__0_0", "killed"),
    "failed": ("__0_1", "failed"),
    "failed in a thread": ("__0_0", "failed"),  # there mcore's `check_local_output` ends the process by an assertion
}
"""Which of the two files that a rank writes is not written whole, and how."""


@contextlib.contextmanager
def breaking(patch, offload, folder, writer, fate, save):
    """A training that saves every second step, in the background, whose writer breaks in one save."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    file, how = FATES[fate]
    of = f"iter_{save:07d}/{file}"
    with patch.context() as patch, training(offload) as run:
        # Bridge's clean-up ends the process of mcore's queue, and the next save would spawn another.
        patch.setattr(filesystem_async, "_results_queue", children.context().Manager().Queue())
        if writer == "mcore":
            loop = functools.partial(async_worker.broken_mcore_loop, of, how)
            async_worker.have_bridge_use("mcore", patch.setattr, quickly=True, loop=loop)
        else:
            async_worker.break_the_writing(of, how, patch.setattr)
        configured(run, checkpoint__save_interval=2, checkpoint__storage_writers_per_rank=2)
        run.cfg.checkpoint.dist_ckpt_optim_fully_reshardable = False
        background(run, writer, folder)
        yield run
        assert not (folder / f"iter_{save:07d}" / ".metadata").exists()


def end_of_training(run, each_step):
    """Train four steps; return the error that came out, in words.

    Cleans up as Bridge's `pretrain` does after any error.
    """
    from megatron.bridge.training.pretrain import _abort_async_checkpoint_worker

    with pytest.raises((CheckpointException, TimeoutError)) as error:
        train(run, 4, each_step)
    _abort_async_checkpoint_worker(run.state)
    return repr(error.value)


@pytest.fixture
def copies(monkeypatch):
    """For each copy that a writer got, and each buffer lent to it, what tells whether nobody refers to it any more."""
    left = []
    lend = SharedHostBuffer.lend

    def noting(copy):
        def noted(tensor):
            result = copy(tensor)
            left.append(StorageWeakRef(result.untyped_storage()).expired)
            return result

        return noted

    def lend_noted(buffer, like, offset):
        left.append(lambda: not buffer.is_lent)
        return lend(buffer, like, offset)

    for name in ("host_copy", "shared_copy"):
        monkeypatch.setattr(snapshot, name, noting(getattr(snapshot, name)))
    monkeypatch.setattr(SharedHostBuffer, "lend", lend_noted)
    return left


def none_is_left(copies):
    """Whether nobody refers to any copy that was handed out, after some were."""
    gc.collect()
    return copies and all(is_gone() for is_gone in copies)


@pytest.fixture(scope="module")
def resident(cpu_standins, tmp_path_factory):
    """The folder of a resident run's checkpoint after two steps, and digests by the number of steps."""
    folder, digests = tmp_path_factory.mktemp("resident"), {}
    with training(False) as run:
        configured(run, checkpoint__save_interval=2, checkpoint__storage_writers_per_rank=2)
        configured(run, checkpoint__save=str(folder), checkpoint__dist_ckpt_optim_fully_reshardable=False)
        train(run, 4, lambda number: digests.update({number - 1: run.digests()}))
        digests[4] = run.digests()
    return folder / "iter_0000002", digests


def wait_for_the_writer(run, writer):
    """Return when what was handed to the writer is written, or is not going to be."""
    for call in run.state.async_calls_queue.async_calls:  # one, or none where the loop has seen the end of it already
        if writer == "fork":
            call.async_caller.process.join()
        else:
            while call.async_caller._persistent_comp_q.empty():
                time.sleep(0.01)


@pytest.mark.parametrize(
    ("writer", "fate", "save"),
    [
        ("fork", "killed", 2),
        ("fork", "failed", 4),
        ("fork", "failed in a thread", 4),
        ("mcore", "failed", 2),
        ("mcore", "failed", 4),
    ],
)
def test_a_writer_that_breaks_is_an_error_of_the_training(resident, tmp_path, monkeypatch, copies, writer, fate, save):
    checkpoint, digests = resident
    for offload in (False, True):
        folder = tmp_path / str(offload)
        with breaking(monkeypatch, offload, folder, writer, fate, save) as run:

            def wait(number, run=run):
                if number == 3:
                    wait_for_the_writer(run, writer)

            error = end_of_training(run, wait)
            assert ("No space left" in error or "Worker failure" in error) == (fate == "failed"), error
            assert run.state.train_state.step in ((2, 3) if save == 2 else (4,))
            assert run.digests() == digests[run.state.train_state.step]
            assert not offload or none_is_left(copies)
        if save == 2:
            assert not (folder / "latest_checkpointed_iteration.txt").exists()
        else:
            assert newest(folder).name == checkpoint.name
            if offload:  # a CPU run shares resident states with a persistent worker, and goes on writing them
                assert_same_shards(newest(folder), checkpoint)
