"""`OffloadConfig.nvme_folder` keeps in a file what the host has no room for, and changes no bit."""

import dataclasses
import errno
import gc
import os
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import async_worker
import both
import debug_transfers
import pytest
from both import WHOLE, bits, release, session_of, steps
from fake_optimizer import state_bytes
from fake_training import Meter, Training, use_small_parts
from late_disk import LateTransfers, require_direct_files
from saving import assert_same_shards, background, finish, load, save, skip_data_of

import bridge_fgo
from bridge_fgo.memory import slab_file
from bridge_fgo.memory.slab_file import DiskBuffer, SlabFile, buffer_bytes
from bridge_fgo.tools.plan.state import sum_of

RAN_ON = "CPU; 30 steps on one H200"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on a disk. Parts are small, and buffers fewer than slabs that are in the file."""
    require_direct_files(tmp_path)
    monkeypatch.setattr(slab_file, "BUFFERS", 3)
    monkeypatch.setattr(slab_file, "MOST_AHEAD", 1)
    monkeypatch.setattr(slab_file, "REQUEST_BYTES", 2**14)
    return str(tmp_path)


def with_folder(folder, nbytes):
    return dataclasses.replace(WHOLE, nvme_folder=str(folder), host_memory_gib=nbytes / 2**30)


def half_in_file(folder, **options):
    """Settings by which the host has room for half of the states, beside the buffers for copies."""
    with both.training(True, WHOLE, **options) as run:
        steps(run)
        sizes = [slab.nbytes for slab in session_of(run).engine.slabs]
    return with_folder(folder, sum(sizes) // 2 + buffer_bytes(sizes))


def in_file(run):
    """Bytes of a run's slabs that are in its file."""
    return sum(slab.nbytes for slab in session_of(run).engine.slabs if slab.host.in_file)


TROUBLE = {"rerun_steps": frozenset({2}), "grad_norm_skip_steps": frozenset({3})}
OPTIONS = {"Adam": {}, "Muon": both.OPTIMIZERS["dist_muon"], "rerun and skip": TROUBLE}


@pytest.mark.parametrize("debug", ["", "3"], ids=["", "poison"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_with_half_of_its_states_in_a_file_is_bitwise_a_resident_one(options, debug, folder, monkeypatch, capsys):
    with both.training(False, **options) as resident:
        expected = steps(resident, 5), resident.digests()
    config = half_in_file(folder, **options)
    monkeypatch.setenv(debug_transfers.VARIABLE, debug)
    with both.training(True, config, **options) as run:
        assert (steps(run, 5), run.digests()) == expected
        engine = session_of(run).engine
        assert 0.4 < in_file(run) / engine.planned_bytes < 0.8 and engine.unhosted_bytes == 0
        planned = sum_of([(source.states(), True) for source in engine.sources], config, config.host_memory_gib * 2**30)
        assert engine.host_bytes <= config.host_memory_gib * 2**30
        assert engine.host_bytes == pytest.approx(planned.hosted, rel=0.01)
        assert planned.in_file == in_file(run)
        stats = bridge_fgo.stats()
        assert stats.file_bytes_written > 0 < stats.file_bytes_read
        assert stats.file_wait_seconds > 0 and "bridge_fgo/file_bytes_read" in stats.scalars()
        assert os.listdir(folder) == []
    assert f"in a file in {folder} (read at" in capsys.readouterr().out


@pytest.mark.parametrize("format", ["fully_reshardable", "dp_reshardable"])
def test_a_save_in_mid_pass_and_a_load_into_a_file_are_a_resident_runs(folder, tmp_path, format):
    config = half_in_file(folder)
    with both.training(False, adam="te") as resident:
        steps(resident, 2)
        save(resident, tmp_path / "resident", format)
        expected = bits(resident), steps(resident, 2), bits(resident)
    with both.training(True, config, adam="te") as run:
        steps(run, 2)
        release(run)
        save(run, tmp_path / "in_file", format)
    for saved in ("resident", "in_file"):
        with both.training(True, config, adam="te") as run:
            load(run, tmp_path / saved)
            assert run.live_state_bytes() == 0 < in_file(run)
            skip_data_of(run, 2)
            assert (bits(run), steps(run, 2), bits(run)) == expected


@pytest.fixture
def outside(folder, monkeypatch):
    """A list that gets of each save the bytes of states that its writer has in no file of the folder."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    prepare, found = FileSystemWriterAsync.prepare_write_data, []

    def prepared(writer, plan, planner):
        prepare(writer, plan, planner)
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if folder in line]
        files = [[int(end, 16) for end in places.split("-")] for places, *_ in maps]
        tensors = [pair for _, _, (_, pairs) in writer.write_buckets for pair in pairs]
        states = [tensor for item, tensor in tensors if item.index.fqn.startswith("optimizer") and tensor.dim()]
        assert states
        in_files = [any(start <= state.data_ptr() < end for start, end in files) for state in states]
        found.append(sum(state.nbytes for state, is_there in zip(states, in_files, strict=True) if not is_there))

    monkeypatch.setattr(FileSystemWriterAsync, "prepare_write_data", prepared)
    return found


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("worker", ["", "fork", "mcore"])
def test_each_save_has_the_bytes_of_its_step_and_takes_no_host_memory(
    folder, tmp_path, outside, monkeypatch, worker, packed
):
    if worker == "mcore":
        async_worker.have_bridge_use(worker, monkeypatch.setattr, quickly=True)
    config = dataclasses.replace(half_in_file(folder), master_remainders=packed)
    for offload in (False, True):
        with both.training(offload, config, adam="te") as run:
            if offload and worker:
                background(run, worker, tmp_path)
            for number in range(3):
                steps(run)
                save(run, tmp_path / f"{offload} {number}", "dp_reshardable")
            steps(run)
            if offload and worker:
                finish(run)
    assert outside[0] > 0 and outside[3:] == [0, 0, 0]
    for number in range(3):
        assert_same_shards(tmp_path / f"True {number}", tmp_path / f"False {number}")


def test_a_save_takes_host_memory_where_the_disk_has_no_room_for_copies_and_says_so(
    folder, tmp_path, outside, monkeypatch, capsys
):
    with both.training(True, half_in_file(folder), adam="te") as run:
        steps(run)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: (_ for _ in ()).throw(full))
        save(run, tmp_path / "saved", "dp_reshardable")
    assert outside[0] > 0
    assert "a save takes host memory for copies of the states: OffloadConfig.nvme_folder=" in capsys.readouterr().out


def test_a_rank_that_has_states_of_one_optimizer_alone_has_no_file_for_the_other_and_says_nothing(folder, capsys):
    with both.training(True, half_in_file(folder)) as run:
        assert session_of(run).engine._file_for_copies(SimpleNamespace(states=list)) is None
    assert "a save takes host memory" not in capsys.readouterr().out


# The disk and the GPU at once.


@pytest.fixture
def late(folder, monkeypatch):
    """Trains with copies that end late, and returns whether the states have the bits of the twin's."""
    use_small_parts(monkeypatch)
    monkeypatch.setattr(Meter, "works", False)

    def bits_are_right(seed):
        made = Training(transfers=LateTransfers(seed), master_remainders=False, in_file=folder)
        made.steps(5)
        made.engine.close()
        return state_bytes(made.optimizers[0]) == state_bytes(made.twins[0])

    return bits_are_right


def no_wait_for_copies_out(patch):
    filled = DiskBuffer.filled
    patch.setattr(DiskBuffer, "filled", lambda self, nbytes, has_happened: filled(self, nbytes))


def no_wait_for_copies_in(patch):
    emptied = DiskBuffer.emptied
    patch.setattr(DiskBuffer, "emptied", lambda self, has_happened: emptied(self))


def test_copies_that_end_late_change_no_bit(late):
    assert all(late(seed) for seed in range(3))


@pytest.mark.parametrize("fault", [no_wait_for_copies_out, no_wait_for_copies_in])
def test_a_missing_wait_between_disk_and_gpu_shows(late, monkeypatch, fault):
    fault(monkeypatch)

    def shows(seed):
        try:
            return not late(seed)
        except (AssertionError, RuntimeError):
            return True

    assert any(shows(seed) for seed in range(3))


def test_the_host_and_the_next_copy_out_wait_for_a_write_under_way(folder, monkeypatch):
    buffer = SlabFile(folder, [8192], Training().engine.traffic).buffer(8192)
    delays = iter([0.2, 0.2, 0])
    failing(monkeypatch, "pwritev", result=lambda real, *arguments: time.sleep(next(delays)) or real(*arguments)).set()
    for value in (1, 2, 3):
        buffer.to_fill().fill_(value)
        buffer.filled(8192)
        if value != 2:
            assert set(buffer.for_host().tolist()) == {value}
    assert set(buffer.to_empty().tolist()) == {3}


def test_a_file_that_nobody_has_ends_its_threads(folder):
    before = set(threading.enumerate())
    file = SlabFile(folder, [8192], Training().engine.traffic)
    memory = file.buffer(8192)
    threads = set(threading.enumerate()) - before
    assert threads
    memory.to_fill()
    memory.filled(8192, lambda: True)
    memory.for_host()
    gone = weakref.ref(file)
    del file, memory
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


# A disk that fails.


def failing(monkeypatch, call, on=lambda number: True, result=None):
    """Have `os.preadv` or `os.pwritev` fail, or be short, from a moment on that the returned switch says."""
    real, switch, numbers = getattr(os, call), threading.Event(), iter(range(10**9))

    def fails(file, buffers, start):
        if not switch.is_set() or not on(next(numbers)):
            return real(file, buffers, start)
        if result is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return result(real, file, buffers, start)

    monkeypatch.setattr(slab_file.os, call, fails)
    return switch


def short(real, file, buffers, start):
    return real(file, [buffers[0][:4096]], start)


def with_another_bit(real, file, buffers, start):
    count = real(file, buffers, start)
    buffers[0][7] ^= 1
    return count


def slow(real, file, buffers, start):
    time.sleep(0.01)
    return real(file, buffers, start)


def nothing(real, file, buffers, start):
    return 0


@pytest.mark.parametrize("result", [short, slow])
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_short_read_or_write_goes_on_where_it_ended_and_a_slow_one_is_waited_for(call, result, folder, monkeypatch):
    with both.training(False) as resident:
        expected = steps(resident, 3), resident.digests()
    failing(monkeypatch, call, result=result).set()
    with both.training(True, half_in_file(folder)) as run:
        assert (steps(run, 3), run.digests()) == expected
        assert result is short or bridge_fgo.stats().file_wait_seconds > 0.01


def test_a_failed_write_ends_training_before_the_next_update_and_the_states_can_be_saved(folder, monkeypatch):
    with both.training(False) as resident:
        steps(resident, 3)
        expected = bits(resident)
    with both.training(True, half_in_file(folder)) as run:
        steps(run, 2)
        switch = failing(monkeypatch, "pwritev", on=lambda number: number == 0)
        switch.set()
        steps(run)
        with pytest.raises(
            RuntimeError, match=rf"could not be written in .*nvme_folder={folder!r} .*Input/output error"
        ):
            run.step()
        assert bits(run) == expected


@pytest.mark.parametrize(
    ("result", "named"),
    [(None, "Input/output error"), (with_another_bit, "others than were"), (nothing, "were cut short")],
)
def test_a_read_that_fails_or_brings_other_bits_ends_training_and_names_the_folder(folder, monkeypatch, result, named):
    with both.training(True, half_in_file(folder)) as run:
        steps(run, 2)
        switch = failing(monkeypatch, "preadv", result=result)
        switch.set()
        with pytest.raises(RuntimeError, match=rf"could not be read in .*nvme_folder={folder!r} .*{named}"):
            run.step()
            run.step()
        switch.clear()
        assert session_of(run).engine.is_lost is False


def test_a_disk_that_writes_nothing_more_refuses_the_next_copy_out_and_loses_none_before(folder, monkeypatch):
    file = SlabFile(folder, [8192] * 4, Training().engine.traffic)
    *filled, last = [file.buffer(8192) for _ in range(4)]
    failing(monkeypatch, "pwritev").set()
    for value, buffer in enumerate(filled):
        buffer.to_fill().fill_(value)
        buffer.filled(8192)
    with pytest.raises(RuntimeError, match=rf"could not be written in .*nvme_folder={folder!r} .*Input/output error"):
        last.to_fill()
    assert [set(buffer.for_host().tolist()) for buffer in filled] == [{0}, {1}, {2}]


# Folders and settings that raise ValueError before training.


def refused(config, match):
    with pytest.raises(ValueError, match=match), both.training(True, config):
        pass


def test_a_folder_that_is_no_disk_of_the_node_is_refused_by_name(folder, tmp_path, monkeypatch):
    refused(with_folder("/dev/shm", 2**20), r"nvme_folder='/dev/shm': a tmpfs is memory of the host")
    refused(with_folder(tmp_path / "absent", 2**20), r"nvme_folder='.*absent': a file of \d+ bytes could not be made")
    with monkeypatch.context() as patch:
        patch.setattr(slab_file, "file_system", lambda device: "nfs4")
        refused(with_folder(folder, 2**20), r"nvme_folder=.*: nfs4 is no disk of this node")
    with monkeypatch.context() as patch:
        error = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        patch.setattr(slab_file.fcntl, "fcntl", lambda *arguments: (_ for _ in ()).throw(error))
        refused(with_folder(folder, 2**20), r"nvme_folder=.*has no O_DIRECT")
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr(os, "posix_fallocate", lambda *arguments: (_ for _ in ()).throw(full))
        refused(with_folder(folder, 2**20), r"No space left on device\): name a folder that has room for the states of")


def test_a_disk_that_fails_as_its_speed_is_measured_is_refused(folder, monkeypatch):
    failing(monkeypatch, "pwritev").set()
    refused(with_folder(folder, 2**20), r"could not be written in the file in OffloadConfig.nvme_folder=")


def test_less_host_memory_than_the_buffers_take_is_refused(folder):
    refused(
        with_folder(folder, 2**18), r"host_memory_gib=.* with nvme_folder=.*the buffers for copies .* take 0\.50 MiB"
    )


def test_states_that_fit_are_in_no_file_and_rank_0_says_so(folder, capsys):
    with both.training(True, with_folder(folder, 2**30)) as run:
        steps(run)
        assert session_of(run).engine.file is None
    assert f"nothing in {folder}, as it fits" in capsys.readouterr().out
