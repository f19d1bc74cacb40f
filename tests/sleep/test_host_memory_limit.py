"""A limit of host memory is kept, and changes no bit."""

from pathlib import Path

import both
import pytest
import torch
from sleeping import GIB, WHOLE, another_rank, counted, frozen, lock_fails_once, residency, tally_of_a_gpu

import bridge_fgo
from bridge_fgo.memory import host_buffer

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")


def test_what_stays_is_said_once_and_counted_in_each_sleep(sleeper, monkeypatch, capsys):
    me = sleeper()
    me.make(host_memory_limit_gib=1.5 * me.weights_bytes / GIB)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "a limit of" in line]
    assert "of optimizer state and 0.00 GiB of parameters" in line and "stay on the GPU" in line
    memory = me.res._memory
    assert memory.unhosted == me.states_bytes() - sum(slab.nbytes for slab in memory.states.engine.slabs) > 0
    tally = tally_of_a_gpu(monkeypatch, free=0, allocated=[0, 0], reserved=0)
    tally.note_what_stays(memory.unhosted)
    assert tally.moved.stays["unhosted"] == memory.unhosted


def test_weights_that_stay_are_used_read_and_chosen_around(sleeper):
    me = sleeper(frozen=True)
    me.make(host_memory_limit_gib=(me.weights_bytes + 5000) / GIB)
    me.offload()
    stays = me.names() - me.names_away()
    assert 0 < len(stays) < len(me.names(frozen)) and not stays - me.names(frozen)
    me.read_asleep()
    me.reload("params", where=lambda name, _: name not in stays)
    assert "params" not in me.res.away
    me.end()


def test_gradients_that_there_is_no_room_to_keep_are_refused_and_nothing_moves(sleeper):
    me = sleeper()
    with counted() as everything:
        residency(me.training).close()
    me.make(host_memory_limit_gib=sum(everything) / GIB)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"grads='keep'\) takes .*host_memory_limit_gib leaves 0.00 GiB"):
            me.res.offload(grads="keep")
        assert not me.res.away
    me.res.offload()
    me.end()


def test_kept_gradients_whose_host_memory_could_not_be_locked_count_once(sleeper, monkeypatch):
    me = sleeper()
    me.make(host_memory_limit_gib=1.0)
    room = me.res._memory.budget.left
    locked = lock_fails_once(monkeypatch, me.res)
    assert room - me.res._memory.budget.left == sum(host.tensor.numel() for host in locked) > 0


@pytest.mark.parametrize("wrong", [0, -1.5, True, "8", float("nan")])
def test_what_is_no_limit_is_refused(wrong):
    with pytest.raises(ValueError, match=r"host_memory_limit_gib=.*: use a number of GiB above 0"):
        bridge_fgo.Residency(torch.nn.Linear(2, 2), host_memory_limit_gib=wrong)


def test_memory_that_the_flags_engine_has_counts_and_is_refused_where_it_is_over_the_limit(sleeper):
    with bridge_fgo.install(WHOLE):
        me = sleeper(flag=WHOLE)
        with pytest.raises(ValueError, match=r"engine that is attached .* has .* already: raise the limit"):
            residency(me.training, host_memory_limit_gib=1e-6)
        states = 6 * me.weights_bytes
        me.make(host_memory_limit_gib=(states + me.weights_bytes - 1) / GIB)
        assert me.res._memory.unhosted == me.weights_bytes
        me.res.offload()
        assert me.res.away == {"grads", "optimizer"}
        me.end()


def test_a_background_save_takes_its_second_buffers_of_the_limit_or_is_lent_none(sleeper):
    me, said = sleeper(), []
    for gib, lends in ((1.0, True), (7 * me.weights_bytes / GIB, False)):
        res = residency(me.training, host_memory_limit_gib=gib)
        engine = res._memory.states.engine
        engine.warn, room = said.append, res._memory.budget.left
        engine.use_worker_memory()
        assert engine._lends == lends and len(said) == (not lends)
        assert room - res._memory.budget.left == (sum(slab.nbytes for slab in engine.slabs) if lends else 0)
        res.close()
    assert "the limit of host memory has no room" in said[0]


# Frozen parameters in files.


def test_frozen_parameters_in_files_take_no_host_memory_and_are_written_once(sleeper, disk):
    me = sleeper(frozen=True)
    nbytes = sum(param.nbytes for name, param in me.ddp.named_parameters() if frozen(name, param))
    with counted() as usual:
        me.make()
    with counted() as taken:
        me.make(frozen_folder=disk)
        assert me.offload("params", where=frozen).copied == nbytes == sum(usual) - 7 * me.weights_bytes
        me.read_asleep()
        for _ in range(2):
            me.reload()
            assert me.offload("params", where=frozen).copied == 0
    assert sum(taken) == sum(usual) - nbytes and not list(disk.iterdir())
    me.end()


def test_a_reference_model_sleeps_in_files_of_a_folder_that_can_hold_it_and_of_no_other(disk):
    model = torch.nn.Linear(3, 2)
    before = both.exact(dict(model.named_parameters()))
    with pytest.raises(ValueError, match=r"frozen_folder='.*absent'\): a file of 24 bytes could not be made"):
        bridge_fgo.Residency(model, frozen_folder=disk / "absent")
    res = bridge_fgo.Residency(model, frozen_folder=disk, host_memory_limit_gib=1e-9)
    assert res.offload().freed == 32 and res._memory.unhosted == 0
    res.reload()
    assert both.exact(dict(model.named_parameters())) == before


def test_a_folder_in_memory_is_refused_by_the_settings_name():
    if host_buffer.file_system(Path("/dev/shm").stat().st_dev) != "tmpfs":
        pytest.skip("no tmpfs in /dev/shm")
    with pytest.raises(ValueError, match=r"frozen_folder='/dev/shm'\): a tmpfs is memory of the host.*on a disk"):
        bridge_fgo.Residency(torch.nn.Linear(3, 2), frozen_folder="/dev/shm")


def test_a_folder_where_nothing_is_frozen_is_refused(sleeper, tmp_path):
    me = sleeper()
    with pytest.raises(ValueError, match=r"frozen_folder='.*'\): no parameter is frozen on any rank"):
        residency(me.training, frozen_folder=tmp_path)
    me.res.close()


def test_a_rank_without_the_folder_ends_with_the_others_where_nothing_is_frozen(sleeper, monkeypatch):
    """It would go on into collectives that they never reach."""
    me = sleeper()
    me.res.close()
    another_rank(monkeypatch, lambda _: 0)  # first its limit
    with pytest.raises(ValueError, match=r"no parameter is frozen on any rank"):
        residency(me.training)
