"""If a background writer dies, the newest named checkpoint is whole."""

import contextlib
import functools
import gc
import signal
import time
import traceback

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


class StillWaiting(Exception):
    """What ends mcore's waiting."""


@contextlib.contextmanager
def breaking(patch, offload, folder, writer, fate, save):
    """A training that saves every second step, in the background, whose writer breaks in one save; and its workers."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    file, how = FATES[fate]
    of, workers = f"iter_{save:07d}/{file}", []
    with patch.context() as patch, training(offload) as run:
        # Bridge's clean-up ends the process of mcore's queue, and the next save would spawn another.
        patch.setattr(filesystem_async, "_results_queue", children.context().Manager().Queue())
        if writer == "mcore":
            loop = functools.partial(async_worker.broken_mcore_loop, of, how)
            workers = async_worker.have_bridge_use("mcore", patch.setattr, quickly=True, loop=loop)
        else:
            async_worker.break_the_writing(of, how, patch.setattr)
        configured(run, checkpoint__save_interval=2, checkpoint__storage_writers_per_rank=2)
        run.cfg.checkpoint.dist_ckpt_optim_fully_reshardable = False
        background(run, writer, folder)
        yield run, workers
        assert not (folder / f"iter_{save:07d}" / ".metadata").exists()


def end_of_training(run, each_step=lambda number: None):
    """Train four steps; return the error that came out, in words, and the functions that it came through.

    Cleans up as Bridge's `pretrain` does after any error.
    """
    from megatron.bridge.training.pretrain import _abort_async_checkpoint_worker

    try:
        train(run, 4, each_step)
    except (CheckpointException, StillWaiting, TimeoutError) as error:
        functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        _abort_async_checkpoint_worker(run.state)
        return repr(error), functions
    pytest.fail("no error came out of the training")


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


def trained_into(
    resident, folder, patch, copies, writer, fate, save, each_step=lambda *of: None, prepare=lambda w: None
):
    """Train, resident and offloaded, until the broken writer is an error; yield each run, and that error.

    each_step: called with the run and the number of a step; prepare: with the workers. Up to the error all was right.
    """
    checkpoint, digests = resident
    for offload in (False, True):
        of_run = folder / str(offload)
        with breaking(patch, offload, of_run, writer, fate, save) as (run, workers):
            prepare(workers)
            yield run, *end_of_training(run, lambda number, run=run: each_step(run, number))
            assert run.digests() == digests[run.state.train_state.step]
            assert not offload or none_is_left(copies)
        if save == 2:
            assert not (of_run / "latest_checkpointed_iteration.txt").exists()
        else:
            assert newest(of_run).name == checkpoint.name
            if offload:  # a CPU run shares resident states with a persistent worker, and goes on writing them
                assert_same_shards(newest(of_run), checkpoint)


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
    def wait(run, number):
        if number == 3:
            wait_for_the_writer(run, writer)

    for run, error, _ in trained_into(resident, tmp_path, monkeypatch, copies, writer, fate, save, wait):
        assert ("No space left" in error or "Worker failure" in error) == (fate == "failed"), error
        assert run.state.train_state.step in ((2, 3) if save == 2 else (4,))


def polls(workers, most):
    """Stand for the sleep between two of mcore's looks for a result: of a worker that is dead it may look so often."""
    left = most

    def sleep(seconds):
        nonlocal left
        left -= not workers[0].is_alive()
        if left == 0:
            raise StillWaiting
        time.sleep(seconds / 10)

    return sleep


@pytest.mark.parametrize("fate", ["killed", "failed in a thread"])
def test_a_persistent_worker_that_died_is_waited_for_resident_too(resident, tmp_path, monkeypatch, copies, fate):
    # Upstream's own: `PersistentAsyncCaller.is_current_async_call_done` asks a queue every tenth of a second, and never
    # whether the process lives. On several ranks the others wait in a collective, which times out.
    from megatron.core.dist_checkpointing.strategies import async_utils

    def poll_soon(workers):
        monkeypatch.setattr(async_utils, "sleep", polls(workers, 20))

    for run, _, functions in trained_into(resident, tmp_path, monkeypatch, copies, "mcore", fate, 4, prepare=poll_soon):
        assert functions[-2] == "is_current_async_call_done"
        assert run.state.train_state.step == 4


def test_training_goes_on_without_its_worker_until_the_next_save_resident_too(resident, tmp_path, monkeypatch, copies):
    # Upstream's own: `PersistentAsyncCaller.schedule_async_call` waits for the dead worker to take the tensors. And
    # where that is interrupted the process does not end: Python joins the thread that feeds the worker's queue.
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    schedule = PersistentAsyncCaller.schedule_async_call

    def schedule_soon(self, request):
        if request.call_idx == 1:
            started[-1][0].join()
            self._persistent_queue.cancel_join_thread()
            self._persistent_preload_q.cancel_join_thread()
            signal.setitimer(signal.ITIMER_REAL, 2)
        schedule(self, request)

    monkeypatch.setattr(PersistentAsyncCaller, "schedule_async_call", schedule_soon)
    started, row = [], ("mcore", "killed", 2)
    for run, _, functions in trained_into(resident, tmp_path, monkeypatch, copies, *row, prepare=started.append):
        assert "schedule_async_call" in functions
        assert run.state.train_state.step == 4
