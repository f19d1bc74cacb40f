"""What the host has, and the refusal before training where that is too little."""

import pytest

from bridge_fgo.core import host_memory
from bridge_fgo.core.host_memory import (
    Need,
    Pool,
    available_bytes,
    host_memory_refusal,
    parse_cpulist,
    pools,
    power_of_two_at_least,
    total_bytes,
)

GIB = 2**30


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A host of 100 GiB with 80 free; returns a function that writes a cgroup's limits and `memory.stat`."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {100 * 2**20} kB\nMemAvailable: {80 * 2**20} kB\n")
    monkeypatch.setattr(host_memory, "MEMINFO", meminfo)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(host_memory, "BOOT_ID", tmp_path / "boot_id")
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "boot_id").write_text("the boot\n")

    def limit(maximum, current=0, **stat):
        (tmp_path / "memory.max").write_text(f"{maximum}\n")
        (tmp_path / "memory.current").write_text(f"{current}\n")
        lines = {"anon": 1, **stat}.items()
        (tmp_path / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in lines))

    return limit


def on_one_host(*needs, free=80, whole=100):
    return [Need(nbytes * GIB, [Pool("host", whole * GIB, free * GIB)]) for nbytes in needs]


def test_enough_memory_passes():
    assert host_memory_refusal(on_one_host(80), 0) == ""


def test_a_rank_that_needs_more_than_is_free_is_refused_with_the_bytes():
    refusal = host_memory_refusal(on_one_host(81), 0)
    assert f"pins {81 * GIB} bytes of host memory for rank 0, {81 * GIB} for the 1 rank(s)" in refusal
    assert f"has {100 * GIB} bytes, {80 * GIB} of them free" in refusal
    assert "OffloadConfig.fraction (at most 0.98 times" in refusal  # not rounded up, which would be refused again


def test_ranks_of_a_node_are_asked_for_what_they_need_together_and_not_for_the_fullest_each():
    stage_0_and_others = [300, *[150] * 7]
    assert host_memory_refusal(on_one_host(*stage_0_and_others, free=1400, whole=1800), 3) == ""
    refusal = host_memory_refusal(on_one_host(*stage_0_and_others, free=1349, whole=1800), 3)
    assert f"pins {150 * GIB} bytes of host memory for rank 3, {1350 * GIB} for the 8 rank(s)" in refusal


def test_each_node_is_asked_for_its_own_ranks():
    def refused(*on_second, rank):
        first = on_one_host(40, 40)
        second = [Need(nbytes * GIB, [Pool("second", 100 * GIB, 90 * GIB)]) for nbytes in on_second]
        return host_memory_refusal([*first, *second], rank)

    assert refused(45, 45, rank=0) == ""
    assert f"{45 * GIB} bytes of host memory for rank 3, {91 * GIB} for the 2 rank(s)" in refused(46, 45, rank=3)
    assert f"{46 * GIB} bytes of host memory for rank 2, {91 * GIB} for the 2 rank(s)" in refused(46, 45, rank=0)


def test_containers_of_a_host_are_held_to_their_own_limits_and_together_to_the_host():
    def refused(*needs, free=80):
        host = Pool("host", 100 * GIB, free * GIB)
        ranks = [Need(n * GIB, [host, Pool(f"host {i}", 50 * GIB, 45 * GIB)]) for i, n in enumerate(needs)]
        return host_memory_refusal(ranks, 0)

    assert refused(40, 40) == ""
    assert f"{81 * GIB} for the 2 rank(s) of its node, but the node has {100 * GIB} bytes" in refused(40, 41)
    assert f"{46 * GIB} for the 1 rank(s) of its node, but the node has {50 * GIB} bytes" in refused(46, 20)


def test_a_rank_that_needs_nothing_is_refused_nothing():
    assert host_memory_refusal(on_one_host(0, free=0), 0) == ""


def test_a_host_is_known_by_its_boot_whatever_its_containers_are_called(host, tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory.platform, "node", lambda: "a container")
    host(50 * GIB)
    before = pools()
    monkeypatch.setattr(host_memory.platform, "node", lambda: "another container")
    assert pools() == before
    assert [pool.identity for pool in before] == ["the boot", f"the boot {tmp_path.stat().st_ino}"]
    (tmp_path / "boot_id").unlink()
    assert pools()[0].identity == "another container"


def test_the_limit_of_a_cgroup_counts(host):
    host(50 * GIB, current=40 * GIB)
    assert (total_bytes(), available_bytes()) == (50 * GIB, 10 * GIB)
    host(50 * GIB, current=51 * GIB)  # a limit that was lowered
    assert available_bytes() == 0
    host("max")
    assert (total_bytes(), available_bytes()) == (100 * GIB, 80 * GIB)


@pytest.mark.parametrize(
    ("stat", "comes_back"),
    [
        ({"inactive_file": 30}, 30),
        ({"active_file": 30}, 30),
        ({"active_file": 10, "inactive_file": 5, "slab_reclaimable": 3, "slab_unreclaimable": 2}, 18),
        # What waits for a disk does not go as fast as it is asked for.
        ({"active_file": 10, "inactive_file": 5, "file_dirty": 6, "file_writeback": 2}, 7),
        ({"inactive_file": 1, "file_dirty": 2, "slab_reclaimable": 3}, 3),
        # Shared memory is no page cache that could be read again.
        ({"shmem": 30, "inactive_anon": 30, "unevictable": 30}, 0),
    ],
)
def test_what_the_kernel_gives_back_of_a_cgroups_memory_counts_as_free(host, stat, comes_back):
    host(50 * GIB, current=40 * GIB, **{name: value * GIB for name, value in stat.items()})
    assert available_bytes() == (10 + comes_back) * GIB


def test_a_cgroup_full_of_clean_page_cache_is_not_refused(host, tmp_path):
    (tmp_path / "meminfo").write_text(f"MemTotal: {2000 * 2**20} kB\nMemAvailable: {1900 * 2**20} kB\n")
    host(1800 * GIB, current=1790 * GIB, inactive_file=10 * GIB, active_file=1550 * GIB)
    assert host_memory_refusal([Need(100 * GIB, pools())], 0) == ""


NO_LIMIT = 2**63 - 4096  # as cgroup v1 writes it


@pytest.mark.parametrize("mounted_at", ["", "system.slice", "system.slice/job_1/step_0"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_least_limit_counts_of_the_cgroups_that_the_process_is_in(host, tmp_path, mounted_at, version):
    path = "system.slice/job_1/step_0"
    own = f"3:cpu:/{path}\n" + (f"4:memory:/{path}\n0::/\n" if version == 1 else f"0::/{path}\n")
    (tmp_path / "own").write_text(own)
    limit, used, cache, dirty = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_dirty"),
        2: ("memory.max", "memory.current", "active_file", "file_dirty"),
    }[version]
    root = tmp_path / "memory" if version == 1 else tmp_path
    for folder, most in ((root, NO_LIMIT), (root / mounted_at, 50 * GIB)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{most}\n")
        (folder / used).write_text(f"{40 * GIB}\n")
        (folder / "memory.stat").write_text(f"{cache} {7 * GIB}\n{dirty} {2 * GIB}\n")
    assert total_bytes() == 50 * GIB
    assert available_bytes() == 15 * GIB
    refusal = host_memory_refusal([Need(16 * GIB, pools())], 0)
    assert f"the node has {50 * GIB} bytes, {15 * GIB} of them free" in refusal


def test_a_pinned_block_of_pytorchs_is_a_power_of_two():
    assert [power_of_two_at_least(n) for n in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]


def test_a_list_of_cpus_is_read():
    assert parse_cpulist("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_cpulist("\n") == set()


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "1"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x16)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,2"}, 4),
    ],
    ids=["alone", "torchrun", "srun", "srun on uneven nodes"],
)
def test_ranks_of_this_node(monkeypatch, environment, ranks):
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert host_memory.ranks_of_this_node() == ranks
