"""A run that is loaded goes on as the run that was saved, bit for bit."""

from __future__ import annotations

import contextlib

import pytest
from saving import load, save
from test_checkpoints import FORMATS, SMALL_SLABS, session_of, training

import bridge_fgo
from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining

SAVED_AFTER, STEPS = 3, 6


pytestmark = pytest.mark.usefixtures("fused_adam_in_mcore")


def finished(run, steps):
    """Train on; return numbers, digests, and what was held as the forwards of each step began."""
    records, held = [], []
    for _ in range(steps):
        records.append(run.step())
        held.append(max(run.live_bytes))
    return [(r.loss, r.grad_norm) for r in records], run.digests(), held


@pytest.fixture(scope="module")
def saved(fused_adam_in_mcore, tmp_path_factory):
    """A run that is saved on its way: the folders by offload and format, and how the resident one ended."""
    folders, ends = {}, {}
    for offload in (False, True):
        with training(offload) as run:
            finished(run, SAVED_AFTER)
            for kind in FORMATS:
                folders[offload, kind] = tmp_path_factory.mktemp("saved")
                save(run, folders[offload, kind], kind)
            ends[offload] = finished(run, STEPS - SAVED_AFTER)
    assert ends[True][:2] == ends[False][:2]
    return folders, ends[False]


@contextlib.contextmanager
def resumed(folder, offload, attached_first=True, **settings):
    """A training that has loaded a checkpoint, and stands at the next microbatch.

    attached_first: whether the offload is attached before the load, as in Bridge's MIMO setup; its other setup loads
    first.
    """
    install = bridge_fgo.install(SMALL_SLABS) if offload and attached_first else contextlib.nullcontext()
    with install, CpuTraining(CpuOptions(offload=offload)) as run:
        for name, value in settings.items():
            setattr(run.cfg.checkpoint, name, value)
        load(run, folder)
        for _ in range(SAVED_AFTER * run.options.microbatches):
            next(run._batches)
        run._batches.advance()
        with bridge_fgo.install(SMALL_SLABS) if offload else contextlib.nullcontext():
            yield run


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("attached_first", [True, False], ids=["attached, loaded", "loaded, attached"])
@pytest.mark.parametrize(("was", "will_be"), [(True, True), (True, False), (False, True)])
def test_a_resumed_run_ends_as_the_one_that_went_on(saved, kind, attached_first, was, will_be):
    folders, end = saved
    with resumed(folders[was, kind], will_be, attached_first) as run:
        numbers, digests, held = finished(run, STEPS - SAVED_AFTER)
    assert (numbers, digests) == end[:2]
    if will_be:
        assert held == [0, 0, 0], "the first forward after a resume has no more on the GPU than any later one"
    else:
        assert min(held) > 0


def test_a_load_without_optimizer_state_goes_on_as_a_resident_one(saved):
    folders, end = saved
    ends = {}
    for offload in (False, True):
        with resumed(folders[True, FORMATS[0]], offload, load_optim=False) as run:
            ends[offload] = finished(run, 2)
    assert ends[True][:2] == ends[False][:2]
    assert ends[True][1] != end[1]
    assert max(ends[True][2]) == 0 < min(ends[False][2])


@pytest.mark.parametrize("load_optim", [True, False])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_load_while_offloaded_is_right(saved, kind, load_optim):
    # Without the gates the load writes into freed memory, and the next reload brings what was there before.
    ends = {}
    for offload in (False, True):
        with training(offload) as run:
            finished(run, 1)
            if offload:
                session_of(run).begin_pass()
                session_of(run).release()
                assert run.live_state_bytes() == 0
            run.cfg.checkpoint.load_optim = load_optim
            load(run, saved[0][True, kind])
            ends[offload] = finished(run, 2)
    assert ends[True][:2] == ends[False][:2]
    assert max(ends[True][2]) == 0
