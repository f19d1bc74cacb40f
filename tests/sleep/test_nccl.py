"""NCCL's communicators are suspended while everything is away, and resumed before the first collective; by a fake."""

import datetime
import inspect
import math
import os
import weakref
from types import SimpleNamespace

import both
import children
import fake_nccl
import pytest
import rank_child
import torch
from sleeping import GIB, another_rank, tally_of_a_gpu
from stream_order import StreamOrder
from test_sleeping_ranks import sleeping

import bridge_fgo
from bridge_fgo.sleep import nccl
from bridge_fgo.sleep.weights import Weights

pytestmark = [
    pytest.mark.usefixtures("cpu_standins"),
    pytest.mark.skipif(not hasattr(torch.distributed.ProcessGroupNCCL, "suspend"), reason="needs PyTorch 2.12"),
]


@pytest.fixture
def fakes(monkeypatch):
    """A fake NCCL of every process group of a training that is made next, and no Residency but of that."""
    monkeypatch.setattr(bridge_fgo.bridge.residency, "_open", weakref.WeakSet())
    monkeypatch.setattr(nccl, "_suspended", {})
    return fake_nccl.Fakes(monkeypatch.setattr)


def test_torch_has_what_is_called_with_these_signatures():
    """On a CPU PyTorch makes no backend of NCCL's: their signatures are what can be held to."""
    c10d = torch.distributed.distributed_c10d
    classes = [getattr(c10d, name) for name in nccl.BACKENDS]
    assert len(classes) == 3
    for backend in classes:
        for name, returned in (("suspend", "None"), ("resume", "None"), ("memory_stats", "dict[str, int]")):
            (line, *_) = inspect.getdoc(getattr(backend, name)).splitlines()
            assert line == f"{name}(self: torch._C._distributed_c10d.Backend) -> {returned}"
    for name in ("register_pre_hook", "unregister_pre_hook"):
        (line, *_) = inspect.getdoc(getattr(c10d.ProcessGroup, name)).splitlines()
        assert line.startswith(f"{name}(self: torch._C._distributed_c10d.ProcessGroup, hook_id: ")
    of_nccl = c10d.ProcessGroupNCCL
    assert min(of_nccl.get_build_nccl_version(), of_nccl.get_runtime_nccl_version()) >= nccl.LEAST_NCCL


def test_groups_without_nccl_are_neither_counted_nor_suspended(sleeper):
    me = sleeper(0)
    assert not nccl._communicators() and nccl.held_bytes() is None
    me.make(nccl="suspend")
    me.res.offload()
    assert not nccl.suspended()


class Older:
    get_build_nccl_version = get_runtime_nccl_version = staticmethod(lambda: (2, 30, 7))


OLDER = rf"PyTorch {torch.__version__.replace('+', '.')}, .*NCCL 2\.29\.6.* takes PyTorch 2\.12 and NCCL 2"
REFUSED = [
    (torch.distributed.ProcessGroupNCCL, "get_build_nccl_version", lambda: (2, 29, 6), OLDER),
    (torch.distributed.ProcessGroupNCCL, "get_runtime_nccl_version", lambda: (2, 29, 6), OLDER),
    (torch.distributed, "ProcessGroupNCCL", Older, "PyTorch .* takes PyTorch 2.12"),
    (torch.distributed, "is_nccl_available", lambda: False, "PyTorch .* was built without NCCL"),
    *((os.environ, name, value, f"the environment variable {name}={value}") for name, value in nccl.OFF_BY.items()),
]


@pytest.mark.parametrize(("owner", "name", "value", "match"), REFUSED)
def test_where_nccl_cannot_suspend_it_is_refused_by_name_and_counts_nothing(
    monkeypatch, fakes, sleeper, owner, name, value, match
):
    sleeper(0)
    assert nccl.held_bytes()
    monkeypatch.setitem(owner, name, value) if owner is os.environ else monkeypatch.setattr(owner, name, value)
    with pytest.raises(ValueError, match=rf"Residency\(nccl='suspend'\): {match}.*, or leave nccl out"):
        bridge_fgo.Residency(torch.nn.Linear(2, 2), nccl="suspend")
    assert nccl.held_bytes() is None
    for setting in ("keep", True, "Suspend", ""):
        with pytest.raises(ValueError, match=rf"Residency\(nccl={setting!r}\): use 'suspend', or None"):
            bridge_fgo.Residency(torch.nn.Linear(2, 2), nccl=setting)


def test_only_what_is_whole_away_suspends_and_its_groups_count_as_what_nccl_still_holds(fakes, sleeper):
    me = sleeper(frozen=True)
    me.offload()
    me.reload()
    assert not fakes.log  # without the setting
    me.make(nccl="suspend")
    groups = len(fakes.awake())
    assert nccl.held_bytes() == 3000 * groups
    me.res.offload("params", where=lambda _, param: not param.requires_grad)
    me.res.offload("grads", "optimizer")
    assert me.res.away == {"params", "grads", "optimizer"} and not fakes.are_suspended
    me.res.offload("params")
    assert fakes.are_suspended and nccl.held_bytes() == 1000 * groups + 2000
    me.res.close()
    assert not fakes.are_suspended and not nccl.suspended()
    suspends, resumes = fakes.log[: groups - 1], fakes.log[groups - 1 :]
    assert [(name, not was) for name, was in suspends] == resumes and all(was for _, was in suspends)


def test_every_residency_of_the_process_has_to_be_away_and_the_first_that_wakes_resumes(fakes, sleeper):
    me = sleeper()
    with torch.random.fork_rng():  # which the training's dropout goes on with
        reference = torch.nn.Linear(4, 4)
    me.make(nccl="suspend")
    other = bridge_fgo.Residency(reference)
    me.res.offload()
    assert not fakes.are_suspended
    other.offload()
    assert fakes.are_suspended
    other.reload()
    assert not fakes.are_suspended
    other.offload()
    assert fakes.are_suspended
    me.res.reload()
    assert not fakes.are_suspended
    other.close()
    me.end()


def test_a_reload_of_what_is_here_resumes_what_others_suspended_also_if_these_are_gone(monkeypatch, fakes, sleeper):
    me = sleeper()
    me.make(nccl="suspend")
    me.res.offload()
    with torch.random.fork_rng():
        other = bridge_fgo.Residency(torch.nn.Linear(4, 4))
    assert fakes.are_suspended
    monkeypatch.setattr(bridge_fgo.bridge.residency, "_open", weakref.WeakSet([other]))
    with other.only([]):
        assert fakes.are_suspended
    other.reload()
    assert not fakes.are_suspended and not nccl.suspended()
    other.close()


def test_weights_that_packed_masters_need_again_are_gathered_by_resumed_groups(monkeypatch, fakes, sleeper):
    with bridge_fgo.install():
        me, gathering, reload = sleeper(2), [], Weights.reload
        me.make(config=both.PACKED, nccl="suspend")
        me.res.serve_states()
        me.res.offload()
        me.moment.sum()  # a reader that is served, as a checkpoint's
        assert fakes.are_suspended

        def reloads(weights, *what):
            gathering.append(not fakes.are_suspended)
            return reload(weights, *what)

        monkeypatch.setattr(Weights, "reload", reloads)
        assert me.res.offload().woke == ("params",)
        assert gathering == [True] and fakes.are_suspended
        me.end()


def test_the_setting_on_some_ranks_alone_is_an_error_on_all_of_them(monkeypatch):
    other = (math.inf, None)
    another_rank(monkeypatch, lambda _: other)
    with pytest.raises(ValueError, match=r"Residency\(nccl='suspend'\) on some ranks alone: set it on all"):
        bridge_fgo.Residency(torch.nn.Linear(2, 2), nccl="suspend")
    other = (math.inf, "suspend")
    with pytest.raises(ValueError, match="on some ranks alone"):
        bridge_fgo.Residency(torch.nn.Linear(2, 2))


def test_states_that_a_limit_keeps_on_the_gpu_do_not_keep_nccl_awake(fakes, sleeper):
    me = sleeper()
    me.make(host_memory_limit_gib=(me.weights_bytes + 5000) / GIB, nccl="suspend")
    me.res.offload()
    assert me.states_bytes() and fakes.are_suspended
    me.res.reload()
    assert not fakes.are_suspended


def test_what_stays_has_the_bytes_of_nccl_beside_those_of_others(monkeypatch, fakes, sleeper):
    sleeper(0)
    tally = tally_of_a_gpu(monkeypatch, 5 * 10**9, [10**9] * 2, 3 * 10**9)
    held = 3000 * len(fakes.awake())
    tally.note_what_stays()
    expected = {"allocated": 10**9, "cached": 2 * 10**9, "nccl": held, "outside": 10**9 - held}
    assert tally.moved.stays == expected


def test_a_communicator_that_pytorch_has_not_made_yet_is_left_out_and_another_error_is_not_hidden(
    monkeypatch, fakes, sleeper
):
    sleeper(0)
    texts = ["NCCL communicator not initialized."]

    def fails(self):
        raise RuntimeError(texts[0])

    monkeypatch.setattr(fake_nccl.FakeNccl, "memory_stats", fails)
    assert nccl.held_bytes() is None and not nccl.suspendable()
    texts[0] = "unhandled cuda error"
    assert nccl.held_bytes() is None  # a figure ends no sleep
    with pytest.raises(RuntimeError, match="unhandled cuda error"):
        nccl.suspendable()


def test_a_wake_without_memory_for_nccl_is_an_error_before_anything_is_resumed(monkeypatch, fakes, sleeper):
    me = sleeper()
    me.make(nccl="suspend")
    me.res.offload()
    free = [2000 * len(nccl.suspended()) - 1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 10**9))
    order, cached = StreamOrder(), ("cached", None)
    monkeypatch.setattr(torch.cuda, "synchronize", order.finish_all)
    monkeypatch.setattr(torch.cuda, "empty_cache", order.return_to_driver)
    order.write(cached)  # by an inference engine's kernels
    order.let_go(cached)
    told = [nccl.suspended()]
    with pytest.raises(torch.OutOfMemoryError, match=r"NCCL's communicators take .* have the inference engine return"):
        nccl.resumable(told, torch.device("cuda", 0))
    free[0] += 1
    assert nccl.resumable(told, torch.device("cuda", 0)) == told[0] and fakes.are_suspended


def test_a_use_of_a_suspended_group_is_an_error_that_names_it_and_one_of_gloo_in_it_is_none():
    on_gpu, on_cpu = torch.empty(2, device="meta"), torch.empty(2)
    for tensors in ([], [on_gpu], [on_cpu, on_gpu]):
        with pytest.raises(RuntimeError, match=r"process group 'tp', .* has suspended: call reload\(\) on every rank"):
            nccl._refuse("tp", SimpleNamespace(input_tensors=tensors, output_tensors=[]))
    nccl._refuse("tp", SimpleNamespace(input_tensors=[on_cpu], output_tensors=[on_cpu]))


def test_groups_that_were_destroyed_asleep_are_forgotten(fakes, sleeper):
    me = sleeper()
    me.make(nccl="suspend")
    me.res.offload()
    assert nccl.suspended()
    torch.distributed.destroy_process_group()
    assert not nccl.suspended()


def test_a_lazy_backend_is_counted_and_not_suspended(monkeypatch, fakes, sleeper):
    monkeypatch.setattr(fake_nccl, "FakeNccl", type(nccl.LAZY, (fake_nccl.FakeNccl,), {}))
    sleeper(0)
    assert nccl.held_bytes() == 3000 * len(fakes.awake()) and not nccl.suspendable()


def test_a_group_that_pytorchs_debug_mode_wraps_is_known_by_the_backend_inside(monkeypatch, sleeper):
    sleeper(0)
    monkeypatch.setattr(nccl, "BACKENDS", ("ProcessGroupGloo",))
    gloo = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    wrapped = torch.distributed.distributed_c10d._ProcessGroupWrapper(gloo, gloo)
    group = SimpleNamespace(_device_types=[torch.device("cuda")], _get_backend=lambda device: wrapped)
    assert type(wrapped) is not type(gloo) and nccl._nccl_of(group) is gloo


def test_a_group_with_processes_outside_of_the_job_is_left_alone():
    mine, engines = ("tp", 2, hash((0, 1))), ("weight sync", 3, hash((0, 1, 2)))
    assert nccl._told_by_all([[mine, engines], [mine]]) == {mine}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"tp": 2}, {"pp": 2}], ids=["dp", "tp", "pp"])
def test_ranks_suspend_in_one_order_and_resume_before_their_first_collective_bitwise(tmp_path, changes):
    for mine in sleeping(tmp_path, rank_child.suspend_nccl, changes, own=[{"nccl": "suspend"}] * 2):
        assert all("has suspended: call reload() on every rank first" in error for error in mine["refused"])
        assert len(mine["refused"]) == 3 and len(mine["log"]) > 100


@pytest.mark.slow
def test_what_nccl_fails_at_fails_on_both_ranks_and_a_wake_says_where_it_cannot_go_on(tmp_path):
    job = rank_child.Job(tmp_path / "ranks", 2, False, None, timeout=datetime.timedelta(seconds=20))
    others, failing = children.run_ranks(rank_child.suspend_nccl_with_errors, job)
    (mine, alike), (asleep, awake), (alone, ended) = failing["errors"]
    assert mine == "RuntimeError: invalid usage" and alike is asleep is awake is None
    assert alone == "RuntimeError: invalid usage" and "on some of their ranks alone: end the job" in ended
    told = "RuntimeError: rank 1 failed, and so every rank does: RuntimeError: invalid usage"
    assert others["errors"][:2] == [[mine, None], [None, None]]
    assert others["errors"][2][0] == told and others["errors"][2][1].startswith("RuntimeError: NCCL has suspended")
