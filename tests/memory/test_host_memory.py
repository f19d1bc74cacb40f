"""What the host has, and the refusal before training where that is too little."""

import pytest

from bridge_fgo.memory import host_memory
from bridge_fgo.memory.host_memory import (
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
    for name in ("NODES", "STATUS", "NUMA_MAPS"):
        monkeypatch.setattr(host_memory, name, tmp_path / name.lower(), raising=False)
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "boot_id").write_text("the boot\n")

    def limit(maximum, current=0, **stat):
        (tmp_path / "memory.max").write_text(f"{maximum}\n")
        (tmp_path / "memory.current").write_text(f"{current}\n")
        lines = {"anon": 1, **stat}.items()
        (tmp_path / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in lines))

    return limit


@pytest.fixture
def numa(host, tmp_path):
    """A host of 2 NUMA nodes; returns a function that makes others, and says which are allowed and of what policy."""

    def nodes(*free, without_cpus=(), allowed="", policy="default", **fields):
        for node, kib in enumerate(free):
            folder = tmp_path / "nodes" / f"node{node}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "cpulist").write_text("\n" if node in without_cpus else f"{node}-{node}\n")
            lines = {"MemTotal": 50, "MemFree": kib, **fields}.items()
            text = "".join(f"Node {node} {name}: {value * 2**20} kB\n" for name, value in lines)
            (folder / "meminfo").write_text(text)
        (tmp_path / "status").write_text(f"Name:\tpython\nMems_allowed_list:\t{allowed or f'0-{len(free) - 1}'}\n")
        (tmp_path / "numa_maps").write_text(
            f"00400000 {policy} file=/usr/bin/python mapped=2 N0=2\n7f00 default heap\n"
        )
        return pools()

    nodes(30, 45)
    return nodes


def on_one_host(*needs, free=80, whole=100):
    return [Need(nbytes * GIB, [Pool("host", whole * GIB, free * GIB)]) for nbytes in needs]


def on_two_hosts(*on_second):
    return [*on_one_host(40, 40), *(Need(n * GIB, [Pool("second", 100 * GIB, 90 * GIB)]) for n in on_second)]


def in_containers(*needs):
    host = Pool("host", 100 * GIB, 80 * GIB)
    return [Need(n * GIB, [host, Pool(f"host {i}", 50 * GIB, 45 * GIB)]) for i, n in enumerate(needs)]


STAGE_0_AND_OTHERS = [300, *[150] * 7]


@pytest.mark.parametrize(
    ("needs", "rank", "refused"),
    [
        (on_one_host(80), 0, None),
        (on_one_host(81), 0, (0, 81, 81, 1)),
        (on_one_host(0, free=0), 0, None),
        # Not what the fullest needs, for each.
        (on_one_host(*STAGE_0_AND_OTHERS, free=1400, whole=1800), 3, None),
        (on_one_host(*STAGE_0_AND_OTHERS, free=1349, whole=1800), 3, (3, 150, 1350, 8)),
        # Each node is asked for its own ranks; a rank of another tells of the first that lacks memory.
        (on_two_hosts(45, 45), 0, None),
        (on_two_hosts(46, 45), 3, (3, 45, 91, 2)),
        (on_two_hosts(46, 45), 0, (2, 46, 91, 2)),
        # Containers are held to their own limits, and together to the host.
        (in_containers(40, 40), 0, None),
        (in_containers(40, 41), 0, (0, 40, 81, 2)),
        (in_containers(46, 20), 0, (0, 46, 46, 1)),
    ],
)
def test_ranks_of_a_node_are_asked_for_what_they_need_together(needs, rank, refused):
    refusal = host_memory_refusal(needs, rank)
    if refused is None:
        assert refusal == ""
    else:
        of, own, together, ranks = refused
        assert (
            f"pins {own * GIB} bytes of host memory for rank {of}, {together * GIB} for the {ranks} rank(s)" in refusal
        )


def test_a_refusal_has_the_bytes_of_the_node_and_what_to_do_and_clean_page_cache_is_no_reason(host, tmp_path):
    refusal = host_memory_refusal(on_one_host(81), 0)
    assert f"has {100 * GIB} bytes, {80 * GIB} of them free" in refusal
    assert "at most 0.98 times as many: set" in refusal  # not rounded up, which would be refused again
    assert f"the node has {50 * GIB} bytes" in host_memory_refusal(in_containers(46, 20), 0)
    (tmp_path / "meminfo").write_text(f"MemTotal: {2000 * 2**20} kB\nMemAvailable: {1900 * 2**20} kB\n")
    host(1800 * GIB, current=1790 * GIB, inactive_file=10 * GIB, active_file=1550 * GIB)
    assert host_memory_refusal([Need(100 * GIB, pools())], 0) == ""


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


def test_a_process_has_the_memory_of_the_nodes_it_is_bound_to_with_what_the_kernel_gives_back(numa):
    assert numa(30, 45) == numa(30, 45, policy="interleave:0") == numa(30, 45, policy="prefer:0") == pools()[:1]
    assert numa(20, 15, 40, policy="bind:0-1")[1][1:3] == (100 * GIB, 35 * GIB)
    clean = {"Active(file)": 8, "Inactive(file)": 4, "Dirty": 2, "Writeback": 1, "SReclaimable": 3}
    assert numa(10, 20, policy="bind:0", **clean)[1].free == (10 + 8 + 4 - 2 - 1 + 3) * GIB


@pytest.mark.parametrize("bound", [{"policy": "bind:0"}, {"policy": "bind=static:0"}, {"allowed": "0"}])
def test_a_process_that_is_bound_to_a_node_has_that_nodes_memory(numa, bound):
    host, node = numa(30, 45, **bound)
    assert (host.whole, host.free, node.whole, node.free) == (100 * GIB, 80 * GIB, 50 * GIB, 30 * GIB)
    assert (total_bytes(), available_bytes()) == (50 * GIB, 30 * GIB)


def test_ranks_of_a_node_are_counted_against_its_memory_and_those_of_another_are_not(numa):
    first, second = numa(30, 45, policy="bind:0"), numa(30, 45, policy="bind:1")

    def refused(*needs):
        at = (first, first, second, second)
        return host_memory_refusal([Need(n * GIB, where) for n, where in zip(needs, at, strict=True)], 0)

    assert refused(15, 15, 22, 22) == ""
    refusal = refused(20, 15, 10, 10)
    assert f"rank 0, {35 * GIB} for the 2 rank(s) of its NUMA node 0, " in refusal
    assert f"has {50 * GIB} bytes, {30 * GIB} of them free now" in refusal and "--membind" in refusal
    assert "rank 2" in refused(15, 15, 23, 23)


def test_a_gpus_memory_that_is_a_node_is_no_host_memory(numa, tmp_path):
    (tmp_path / "meminfo").write_text(f"MemTotal: {200 * 2**20} kB\nMemAvailable: {190 * 2**20} kB\n")
    numa(40, 45, 50, 50, without_cpus=(2, 3))
    assert (total_bytes(), available_bytes()) == (100 * GIB, 85 * GIB)
    assert host_memory.numa_nodes() == {0, 1}
    numa(40, 45, 50, 50, without_cpus=(2, 3), policy="bind:2")  # as of memory beside the CPUs' own
    assert (total_bytes(), available_bytes()) == (50 * GIB, 50 * GIB)


@pytest.mark.parametrize(("policy", "each"), [("default", 20), ("bind:0", 15), ("bind:1", 20)])
def test_each_rank_has_its_part_of_what_it_shares_with_others(numa, monkeypatch, policy, each):
    monkeypatch.setattr(host_memory, "ranks_of_this_node", lambda: 4)
    numa(30, 45, policy=policy)
    assert host_memory.free_for_each_rank() == each * GIB


def test_this_machines_nodes_and_cpus_are_read_and_a_pinned_block_is_a_power_of_two():
    nodes = host_memory.numa_nodes()
    assert all((host_memory.NODES / f"node{node}").exists() for node in nodes)
    assert 0 < available_bytes() <= total_bytes()
    assert [power_of_two_at_least(n) for n in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]
    assert parse_cpulist("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_cpulist("\n") == set()


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "1"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_STEP_TASKS_PER_NODE": "1"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x16)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,2"}, 4),
        ({"LOCAL_WORLD_SIZE": "gpu"}, "variable LOCAL_WORLD_SIZE='gpu': give how many ranks"),
        ({"LOCAL_WORLD_SIZE": "0"}, "variable LOCAL_WORLD_SIZE='0': give how many ranks"),
    ],
    ids=["alone", "torchrun", "mpirun", "srun", "srun on uneven nodes", "no number", "none"],
)
def test_ranks_of_this_node(monkeypatch, environment, ranks):
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(ranks, int):
        assert host_memory.ranks_of_this_node() == ranks
    else:
        with pytest.raises(ValueError, match=ranks):
            host_memory.ranks_of_this_node()
