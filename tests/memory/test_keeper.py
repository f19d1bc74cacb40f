"""The keeper hands files out to its job's ranks alone, and frees what nobody may want."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import children
import pytest
from crash_child import Kept

from bridge_fgo.memory import keeper
from bridge_fgo.memory.keeper import Keeper, KeeperLine

PAGE = 4096


@pytest.fixture
def name():
    return f"test.{os.getpid()}.{time.monotonic_ns()}"


def whole(line, file):
    """Return what a rank's file has, and whether it was there before."""
    descriptor, was_there = line.file(file, PAGE)
    data = os.pread(descriptor, PAGE, 0)
    os.close(descriptor)
    return data, was_there


def write(line, file, data):
    descriptor, was_there = line.file(file, PAGE)
    os.pwrite(descriptor, data, 0)
    os.close(descriptor)
    return was_there


def in_another_process(act, *args):
    with ProcessPoolExecutor(1, mp_context=children.context()) as pool:
        return pool.submit(act, *args).result()


def write_and_die(name, rank):
    write(KeeperLine(name, rank, 2), "a", b"kept")


def test_bytes_that_a_process_wrote_are_there_for_the_next_one_of_its_rank_alone(name):
    with Kept(name):
        in_another_process(write_and_die, name, 1)
        line = KeeperLine(name, 1, 2)
        assert whole(line, "a") == (b"kept" + bytes(PAGE - 4), True)
        assert whole(KeeperLine(name, 0, 2), "a") == (bytes(PAGE), False)


def test_a_file_of_another_size_and_those_of_ranks_that_the_job_has_no_more_are_dropped(name):
    with Kept(name) as kept:
        in_another_process(write_and_die, name, 1)
        line = KeeperLine(name, 0, 2)
        write(line, "b", b"x")
        assert line.file("b", 2 * PAGE)[1] is False
        KeeperLine(name, 0, 1)
        assert set(kept.keeper._files) == {"0/b"}


def test_more_than_the_limit_is_refused_with_the_option_to_raise(name):
    with Kept(name, limit=3 * PAGE):
        line = KeeperLine(name, 0, 1)
        line.file("a", 2 * PAGE)
        with pytest.raises(MemoryError, match="--memory-gib"):
            line.file("b", 2 * PAGE)
        assert line.file("b", PAGE)


def test_files_of_ranks_that_run_elsewhere_now_are_dropped_if_others_need_the_memory(name):
    with Kept(name, limit=2 * PAGE):
        in_another_process(write_and_die, name, 1)
        line = KeeperLine(name, 0, 2)
        line.file("a", PAGE)
        assert whole(KeeperLine(name, 1, 2), "a")[1], "there was room for both"
    with Kept(name, limit=2 * PAGE) as kept:
        in_another_process(write_and_die, name, 1)
        KeeperLine(name, 0, 2).file("a", 2 * PAGE)
        assert set(kept.keeper._files) == {"0/a"}


def test_a_job_has_one_keeper_on_a_node_and_another_job_has_its_own(name):
    with Kept(name), Kept(name + ".other"):
        with pytest.raises(ValueError, match="already"):
            Keeper(name, PAGE, 1.0)
        write(KeeperLine(name, 0, 1), "a", b"x")
        assert whole(KeeperLine(name + ".other", 0, 1), "a") == (bytes(PAGE), False)


def ask_as(user, name, address, trusts):
    keeper._address = lambda job: address
    if trusts:
        keeper._peer = lambda connection: (0, user)
    os.setuid(user)
    try:
        KeeperLine(name, 0, 1)
    except OSError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_another_user_is_served_nothing_and_trusts_no_other_users_keeper(name):
    with Kept(name):
        told = [in_another_process(ask_as, 65534, name, keeper._address(name), trusts) for trusts in (False, True)]
    assert told[0] == "PermissionError: it is of user 0, and this process of 65534"
    assert told[1] is not None and told[1].startswith(("ConnectionResetError", "BrokenPipeError"))


def hold(name, ready):
    line = KeeperLine(name, 0, 1)
    ready.set()
    time.sleep(60)
    del line


def test_a_start_waits_for_the_process_that_the_rank_was_before(name, monkeypatch):
    context = children.context()
    with Kept(name):
        ready = context.Event()
        old = context.Process(target=hold, args=(name, ready))
        old.start()
        ready.wait()
        monkeypatch.setattr(keeper, "PATIENCE", 0.2)
        with pytest.raises(TimeoutError, match=str(old.pid)):
            KeeperLine(name, 0, 1)
        monkeypatch.setattr(keeper, "PATIENCE", 30.0)
        threading.Timer(0.3, old.kill).start()
        assert KeeperLine(name, 0, 1).is_alive()
        old.join()


def test_files_that_no_rank_uses_are_freed_after_a_while(name):
    with Kept(name, idle_seconds=0.5) as kept:
        in_another_process(write_and_die, name, 0)
        assert kept.keeper._files
        end = time.monotonic() + 20
        while kept.keeper._files and time.monotonic() < end:
            time.sleep(0.1)
        assert not kept.keeper._files


def keep(name, *arguments, **options):
    environment = {**os.environ, keeper.VARIABLE: name}
    return subprocess.Popen([sys.executable, "-m", "bridge_fgo", "keep", *arguments], env=environment, **options)


def connected(name, process):
    end = time.monotonic() + 60
    while True:
        try:
            return KeeperLine(name, 0, 1)
        except ConnectionRefusedError:
            assert time.monotonic() < end, process.poll()
            time.sleep(0.1)


def test_a_rank_learns_that_its_keeper_was_killed_and_its_memory_stays_usable(name):
    process = keep(name)
    line = connected(name, process)
    descriptor, _ = line.file("a", PAGE)
    assert line.is_alive()
    process.kill()
    process.wait()
    assert not line.is_alive()
    assert os.pwrite(descriptor, b"x", 0) == 1
    os.close(descriptor)
    with pytest.raises(ConnectionRefusedError):
        KeeperLine(name, 0, 1)


def test_a_command_is_started_again_as_often_as_told_with_the_keepers_memory_and_its_status(name, tmp_path):
    count = f"import os, sys; open({str(tmp_path / 'starts')!r}, 'a').write('x'); sys.exit(7)"
    process = keep(name, "--restarts", "2", "--", sys.executable, "-c", count, stderr=subprocess.PIPE, text=True)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 7 and (tmp_path / "starts").read_text() == "xxx"
    assert told.count("started again") == 2


def test_a_keeper_ends_with_a_signal_and_so_does_its_command(name):
    process = keep(name, "--restarts", "2", "--", "sleep", "600")
    connected(name, process)
    process.terminate()
    assert process.wait(timeout=30) == 128 + 15
    with pytest.raises(ConnectionRefusedError):
        KeeperLine(name, 0, 1)
