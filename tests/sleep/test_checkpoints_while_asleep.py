"""Checkpoints are saved and loaded while everything is off the GPU."""

import contextlib

import pytest
import torch
from both import PACKED, numbers
from cpu_training import CpuTraining
from saving import FORMATS, assert_same_shards, load, save, skip_data_of
from sleeping import KINDS, WHOLE, options

import bridge_fgo

pytestmark = pytest.mark.usefixtures("cpu_standins", "fused_adam_in_mcore", "poisoned")

MODELS = pytest.mark.parametrize(
    "changes", [{}, pytest.param({"experts": True}, marks=pytest.mark.slow)], ids=["dense", "experts"]
)


@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.slow), True], ids=["not installed", "installed"])
def is_installed(request, cpu_standins):
    """Whether the package is installed, as which the test runs."""
    with bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native")) if request.param else contextlib.nullcontext():
        yield request.param


@pytest.fixture(scope="module")
def saved(cpu_standins, fused_adam_in_mcore, tmp_path_factory):
    """Resident trainings that are saved after three steps: folder by format, and two more steps; by model."""
    found = {}
    for experts in (False, True):
        with CpuTraining(options(experts=experts)) as training:
            steps = [training.step() for _ in range(3)]
            folders = {kind: tmp_path_factory.mktemp("saved") for kind in FORMATS}
            for kind, folder in folders.items():
                save(training, folder, kind)
            steps += [training.step() for _ in range(2)]
            found[experts] = folders, numbers(steps), training.digests()
    return found


def end(me):
    """Train on for two steps; return what was seen, and the digests."""
    return me.train(2), me.training.digests()


@contextlib.contextmanager
def checkpointing_asleep(me):
    """Context of a checkpoint of a training that sleeps before it and after it, with as much; and then wakes."""
    first = me.res.offload()
    with me.res.checkpointing():
        yield
    assert me.res.away == set(KINDS) and me.training.live_state_bytes() == 0
    me.res.reload()
    assert me.res.offload().freed == first.freed
    assert me.res.offload().freed == 0
    me.res.reload()


@MODELS
@pytest.mark.parametrize("kind", FORMATS)
def test_a_save_while_asleep_writes_the_bytes_of_one_awake_and_training_goes_on(
    sleeper, saved, tmp_path, is_installed, changes, kind
):
    folders, *expected = saved[bool(changes)]
    me = sleeper(3, early=True, **changes)
    with checkpointing_asleep(me):
        assert me.res.away == ({"grads", "optimizer"} if is_installed else {"grads"})
        held = me.training.live_state_bytes()
        assert (held == 0) == is_installed
        save(me.training, tmp_path, kind)
        assert me.training.live_state_bytes() == held
    assert [*end(me)] == expected
    assert_same_shards(tmp_path, folders[kind])


@pytest.mark.parametrize("config", [WHOLE, PACKED], ids=["whole masters", "packed masters"])
@MODELS
@pytest.mark.parametrize("kind", FORMATS)
def test_a_load_while_asleep_gives_the_training_of_one_awake(sleeper, saved, is_installed, changes, kind, config):
    folders, *_ = saved[bool(changes)]
    me = sleeper(config=config, early=True, **changes)
    load(me.training, folders[kind])
    awake = end(me)
    me = sleeper(config=config, early=True, **changes)
    with checkpointing_asleep(me):
        load(me.training, folders[kind])
    assert end(me) == awake


def test_a_load_into_an_optimizer_that_has_never_stepped_gives_what_was_saved(sleeper, saved, is_installed):
    folders, seen, digests = saved[False]
    me = sleeper(0)
    me.res.offload()
    with me.res.checkpointing():
        load(me.training, folders["dp_reshardable"])
    me.res.reload()
    skip_data_of(me.training, 3)
    assert end(me) == (seen[3:], digests)


def test_a_save_that_fails_or_is_outside_of_the_context_leaves_everything_asleep(sleeper, is_installed, tmp_path):
    me = sleeper(early=True)
    me.offload()
    with pytest.raises(ZeroDivisionError), me.res.checkpointing():
        _ = 1 / 0
    assert me.res.away == set(KINDS)
    with pytest.raises(RuntimeError, match=r"Residency\.checkpointing\(\)"):
        save(me.training, tmp_path)
    me.end()


def test_states_that_were_written_between_two_sleeps_are_not_taken_for_what_the_host_has(sleeper):
    me = sleeper(early=True, experts=True)
    moment = me.moment
    me.res.offload("optimizer")
    slabs = me.res._memory.states.engine.slabs
    (slab,) = (slab for slab in slabs if any(state.read() is moment for state in slab.states))
    slab.require_writable()  # as a load has it that writes to the tensors themselves
    assert me.res.away == {"optimizer"} and len(slabs) > 1
    moment.fill_(3.0)
    me.res.reload()
    me.res.offload("optimizer")
    me.res.reload()
    assert torch.equal(moment, torch.full_like(moment, 3.0))
