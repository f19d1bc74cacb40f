"""Ranks that sleep copy their own shards, and stay bitwise."""

import datetime
import functools

import children
import pytest
import rank_child

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.slow]


def sleeping(folder, act, changes=None, ranks=2, **how):
    """Return what ranks that move memory have returned, which train as resident ones do."""
    _, (_, mine) = rank_child.run_both(folder, functools.partial(act, **how), changes, steps=3, ranks=ranks)
    return mine


@pytest.mark.parametrize("changes", [{}, {"overlap_grad_reduce": True, "overlap_param_gather": True, "experts": True}])
def test_two_ranks_that_sleep_are_bitwise_resident_ones_and_copy_half_the_weights_each(tmp_path, changes):
    for mine in sleeping(tmp_path, rank_child.train_and_sleep, changes):
        (first, wake, _), *later = mine["copied"]
        assert first == 0  # told by the masters
        for out, alone, again in later:
            assert 2 * out == 2 * alone == wake and again == 0


@pytest.mark.parametrize("changes", [{}, {"experts": True}, {"tp": 2}], ids=["dense", "experts", "tp"])
def test_two_ranks_read_their_own_shards_on_the_host_and_together_all_weights(tmp_path, changes):
    ranks = sleeping(tmp_path, rank_child.read_asleep, changes)
    for shares in zip(*(mine["shares"] for mine in ranks), strict=True):
        assert sum(shares) == 2 if "tp" in changes else max(shares) < 0.6 and abs(sum(shares) - 1) < 1e-6


def test_a_buffer_for_which_one_rank_alone_asks_is_reloaded_on_both_which_the_other_says(tmp_path):
    for rank, mine in enumerate(sleeping(tmp_path, rank_child.wake_adapters, {"frozen": True})):
        assert mine["woke"] == 3 * [[] if rank == 0 else ["params"]]


def test_ranks_keep_to_the_least_limit_of_host_memory_that_any_is_given(tmp_path):
    limits = [1e-3, 2e-4]
    own = [{"config": rank_child.CONFIG, "host_memory_limit_gib": limit} for limit in limits]
    for mine in sleeping(tmp_path, rank_child.sleep_within, {"experts": True}, own=own):
        assert 0 < mine["taken"] <= limits[1] * 2**30 and mine["stays"] > 0


@pytest.mark.parametrize("changes", [{"overlap_param_gather": True, "overlap_grad_reduce": True}, {"tp": 2}, {"pp": 2}])
def test_two_ranks_that_swap_weights_are_bitwise_resident_ones_and_copy_their_shards(tmp_path, changes):
    for mine in sleeping(tmp_path, rank_child.train_and_swap, changes):
        unchanged, asleep, *later = mine["swapped"]
        assert unchanged == 0 < asleep
        for awake, alone in zip(*[iter(later)] * 2, strict=True):
            assert awake == 2 * alone == 2 * asleep


def test_masters_that_one_rank_alone_packs_bring_weights_on_both_and_change_no_bit(tmp_path):
    own = [{}, {"config": rank_child.PACKED}]
    for mine in sleeping(tmp_path, rank_child.sleep_in_parts, own=own):
        assert mine["away"] == 3 * [["grads"]]


@pytest.mark.parametrize(("stage", "dp"), [(0, 1), (1, 1), (0, 2)])
def test_a_stage_in_which_nothing_trains_sleeps_and_the_ranks_are_bitwise_resident_ones(tmp_path, stage, dp):
    sleeping(tmp_path, rank_child.train_and_sleep, {"pp": 2, "frozen_stage": stage}, ranks=2 * dp)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_in_which_nothing_trains_trains_saves_and_loads_with_the_flag_as_without(tmp_path, stage):
    loads = (None, None)
    for name in ("first", "again"):
        # mcore itself saves no stage without states in the fully reshardable kind.
        how = {"loads": loads, "steps": 3, "kind": "dp_reshardable"}
        changes = {"pp": 2, "frozen_stage": stage}
        folders, (resident, offloaded) = rank_child.run_both(tmp_path / name, rank_child.train, changes, **how)
        assert [max(mine["held"]) for mine in offloaded] == [0, 0]
        assert sum(max(theirs["held"]) for theirs in resident) > 0
        loads = [folder / "trained" for folder in folders]


def test_verbs_of_two_models_that_two_threads_call_end_one_before_the_other_on_both_ranks(tmp_path):
    job = rank_child.Job(tmp_path / "ranks", 2, True, None, timeout=datetime.timedelta(seconds=20))
    for mine in children.run_ranks(rank_child.sleep_by_two_threads, job):
        assert mine == {"errors": [None, None], "away": [["params"], ["params"]]}
