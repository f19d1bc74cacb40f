"""Checkpoints that are saved and loaded while everything is off the GPU, by Bridge's own save and load."""

from __future__ import annotations

import contextlib

import children
import pytest
import rank_child
import torch
from saving import load, save
from sleeping import KINDS, numbers, options, residency
from test_checkpoints import FORMATS, assert_same_shards

import bridge_fgo
from bridge_fgo.tools.arms.cpu_training import CpuTraining

pytestmark = pytest.mark.usefixtures("cpu_standins", "fused_adam_in_mcore", "poisoned")

INSTALLED = pytest.mark.parametrize("installed", [False, True], ids=["not installed", "installed"])
MODELS = pytest.mark.parametrize(
    "changes", [{}, pytest.param({"experts": True}, marks=pytest.mark.slow)], ids=["dense", "experts"]
)
PACKED = bridge_fgo.OffloadConfig(engine="native", master_remainders=True, slab_bytes=2**20)


@contextlib.contextmanager
def sleeper(installed, config=None, **changes):
    """A training and its residency."""
    with contextlib.ExitStack() as stack:
        if installed:
            stack.enter_context(bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native")))
        training = stack.enter_context(CpuTraining(options(**changes)))
        yield training, residency(training, config=config)


def train(training, steps):
    return [numbers(training.step()) for _ in range(steps)]


@pytest.fixture(scope="module")
def saved(cpu_standins, fused_adam_in_mcore, tmp_path_factory):
    """Resident trainings that are saved after three steps: folder by format, and two more steps; by model."""
    found = {}
    for experts in (False, True):
        with CpuTraining(options(experts=experts)) as training:
            train(training, 3)
            folders = {kind: tmp_path_factory.mktemp("saved") for kind in FORMATS}
            for kind, folder in folders.items():
                save(training, folder, kind)
            found[experts] = folders, train(training, 2), training.digests()
    return found


@INSTALLED
@MODELS
@pytest.mark.parametrize("kind", FORMATS)
def test_a_save_while_asleep_writes_the_bytes_of_one_awake_and_training_goes_on(
    saved, tmp_path, installed, changes, kind
):
    folders, expected, digests = saved[bool(changes)]
    with sleeper(installed, **changes) as (training, res):
        train(training, 3)
        first = res.offload()
        with res.checkpointing():
            assert res.away == ({"grads", "optimizer"} if installed else {"grads"})
            held = training.live_state_bytes()
            assert (held == 0) == installed
            save(training, tmp_path, kind)
            assert training.live_state_bytes() == held
        assert res.away == set(KINDS) and training.live_state_bytes() == 0
        res.reload()
        assert res.offload().freed == first.freed
        res.reload()
        assert train(training, 2) == expected and training.digests() == digests
    assert_same_shards(tmp_path, folders[kind])


@pytest.mark.parametrize("config", [None, PACKED], ids=["whole masters", "packed masters"])
@INSTALLED
@MODELS
@pytest.mark.parametrize("kind", FORMATS)
def test_a_load_while_asleep_gives_the_training_of_one_awake(saved, installed, changes, kind, config):
    folders, *_ = saved[bool(changes)]
    ends = []
    for asleep in (False, True):
        with sleeper(installed, config, **changes) as (training, res):
            train(training, 1)
            if asleep:
                first = res.offload()
                with res.checkpointing():
                    load(training, folders[kind])
                assert res.away == set(KINDS) and training.live_state_bytes() == 0
                res.reload()
                assert res.offload().freed == first.freed
                assert res.offload().freed == 0
                res.reload()
            else:
                load(training, folders[kind])
            ends.append((train(training, 2), training.digests()))
    assert ends[0] == ends[1]


@INSTALLED
def test_a_load_into_an_optimizer_that_has_never_stepped_gives_what_was_saved(saved, installed):
    folders, expected, digests = saved[False]
    with sleeper(installed) as (training, res):
        res.offload()
        with res.checkpointing():
            load(training, folders["dp_reshardable"])
        res.reload()
        for _ in range(3 * training.options.microbatches):
            next(training._batches)
        training._batches.advance()
        assert train(training, 2) == expected and training.digests() == digests


@INSTALLED
def test_awake_nothing_has_moved_after_a_save_or_a_load(tmp_path, installed):
    ends = []
    for uses in (False, True):
        with sleeper(installed) as (training, res):
            train(training, 3)
            for act in (save, load):
                with res.checkpointing() if uses else contextlib.nullcontext():
                    act(training, tmp_path / str(uses))
                assert res.away == set() and training.live_state_bytes() > 0
            ends.append((train(training, 2), training.digests()))
    assert ends[0] == ends[1]


def test_outside_of_the_context_a_save_while_asleep_says_what_to_use(tmp_path):
    with sleeper(True) as (training, res):
        train(training, 1)
        res.offload()
        with pytest.raises(RuntimeError, match=r"Residency\.checkpointing\(\)"):
            save(training, tmp_path)
        res.reload()
        train(training, 1)


def test_a_save_that_fails_leaves_everything_asleep_and_whole(saved, tmp_path):
    _, expected, digests = saved[False]
    with sleeper(True) as (training, res):
        train(training, 3)
        res.offload()
        with pytest.raises(ZeroDivisionError), res.checkpointing():
            _ = 1 / 0
        assert res.away == set(KINDS)
        res.reload()
        assert train(training, 2) == expected and training.digests() == digests


def test_states_that_were_written_between_two_sleeps_are_not_taken_for_what_the_host_has():
    with sleeper(True, experts=True) as (training, res):
        train(training, 1)
        leaf, *_ = training.optimizer.chained_optimizers
        moment = next(iter(leaf.optimizer.state.values()))["exp_avg"]
        res.offload("optimizer")
        slabs = res._states.engine.slabs
        (slab,) = (slab for slab in slabs if any(state.read() is moment for state in slab.states))
        slab.require_writable()  # as a load has it that writes to the tensors themselves
        assert res.away == {"optimizer"} and len(slabs) > 1
        moment.fill_(3.0)
        res.reload()
        res.offload("optimizer")
        res.reload()
        assert torch.equal(moment, torch.full_like(moment, 3.0))


@pytest.mark.slow
def test_two_ranks_save_asleep_what_they_save_awake_and_load_it_asleep(tmp_path):
    for name, asleep in (("awake", False), ("asleep", True)):
        folder = tmp_path / name
        folder.mkdir()
        job = rank_child.Job(folder, 2, asleep, None, steps=2)
        started = [children.start(rank_child.save_and_load, rank, job) for rank in range(2)]
        assert [children.join(child, "as one of 2 ranks") for child in started] == [0, 0]
    assert_same_shards(tmp_path / "asleep/saved", tmp_path / "awake/saved")
    for rank in range(2):
        assert (tmp_path / f"asleep/{rank}.json").read_text() == (tmp_path / f"awake/{rank}.json").read_text()
