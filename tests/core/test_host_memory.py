"""What the host has, and the refusal before training where that is too little."""

import gc

import pytest

from bridge_fgo.core import host_memory
from bridge_fgo.core.host_memory import (
    available_bytes,
    parse_cpulist,
    power_of_two_at_least,
    require_host_memory,
    total_bytes,
)

GIB = 2**30


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A host of 100 GiB with 80 free; returns a function that writes a cgroup's limits."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {100 * 2**20} kB\nMemAvailable: {80 * 2**20} kB\n")
    monkeypatch.setattr(host_memory, "MEMINFO", meminfo)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

    def limit(maximum, current=0, inactive=0):
        (tmp_path / "memory.max").write_text(f"{maximum}\n")
        (tmp_path / "memory.current").write_text(f"{current}\n")
        (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")

    return limit


def test_enough_memory_passes(host):
    require_host_memory(80 * GIB)


def test_a_rank_that_needs_more_than_is_free_is_refused_with_the_bytes(host):
    with pytest.raises(ValueError, match=rf"pins {81 * GIB} bytes.*OffloadConfig.fraction \(at most 0.99"):
        require_host_memory(81 * GIB)


def test_what_a_dropped_optimizer_pins_is_given_back_before_a_refusal(host, monkeypatch):
    class Dropped:
        def __init__(self):
            self.itself = self

        def __del__(self):
            freed.append(True)

    freed = []
    monkeypatch.setattr(host_memory, "available_bytes", lambda: (80 if freed else 10) * GIB)
    Dropped()
    gc.disable()
    try:
        require_host_memory(10 * GIB)
        assert not freed
        require_host_memory(80 * GIB)
    finally:
        gc.enable()


def test_ranks_of_a_node_are_refused_together(host, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    require_host_memory(25 * GIB)
    with pytest.raises(ValueError, match=rf"about {4 * 26 * GIB} on this node with its 4 rank"):
        require_host_memory(26 * GIB)


def test_the_limit_of_a_cgroup_counts_and_its_page_cache_does_not(host):
    host(50 * GIB, current=40 * GIB, inactive=30 * GIB)
    assert total_bytes() == 50 * GIB
    assert available_bytes() == 40 * GIB
    host("max")
    assert total_bytes() == 100 * GIB
    assert available_bytes() == 80 * GIB


NO_LIMIT = 2**63 - 4096  # as cgroup v1 writes it


@pytest.mark.parametrize("mounted_at", ["", "system.slice", "system.slice/job_1/step_0"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_least_limit_counts_of_the_cgroups_that_the_process_is_in(host, tmp_path, mounted_at, version):
    path = "system.slice/job_1/step_0"
    own = f"3:cpu:/{path}\n" + (f"4:memory:/{path}\n0::/\n" if version == 1 else f"0::/{path}\n")
    (tmp_path / "own").write_text(own)
    limit, used, cache = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    root = tmp_path / "memory" if version == 1 else tmp_path
    for folder, most in ((root, NO_LIMIT), (root / mounted_at, 50 * GIB)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{most}\n")
        (folder / used).write_text(f"{40 * GIB}\n")
        (folder / "memory.stat").write_text(f"{cache} {5 * GIB}\n")
    assert total_bytes() == 50 * GIB
    assert available_bytes() == 15 * GIB
    with pytest.raises(ValueError, match=f"the node has {50 * GIB} bytes, {15 * GIB} of them free"):
        require_host_memory(16 * GIB)


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
