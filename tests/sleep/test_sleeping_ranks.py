"""Two data-parallel ranks, each a process, copy their own shards and all-gather the others'."""

import functools

import children
import pytest
import rank_child

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.slow]


def run_both(folder, act, ranks=2, **how):
    """Run ranks that move memory, and resident ones, and check that they train the same; return what each has left."""
    sleeping, resident = (
        children.run_ranks(
            functools.partial(act, **how), rank_child.Job(folder / str(moves), ranks, moves, None, steps=3)
        )
        for moves in (True, False)
    )
    for mine, theirs in zip(sleeping, resident, strict=True):
        assert mine["numbers"] == theirs["numbers"] and mine["digests"] == theirs["digests"]
    return sleeping, resident


@pytest.mark.parametrize("changes", [{}, {"overlap_grad_reduce": True, "overlap_param_gather": True, "experts": True}])
def test_two_ranks_that_sleep_are_bitwise_resident_ones_and_copy_half_the_weights_each(tmp_path, changes):
    for mine in run_both(tmp_path, rank_child.train_and_sleep, changes=changes)[0]:
        (first, wake, _), *later = mine["copied"]
        assert first == 0  # told by the masters
        for out, alone, again in later:
            assert 2 * out == 2 * alone == wake and again == 0


@pytest.mark.parametrize("changes", [{}, {"experts": True}, {"tp": 2}], ids=["dense", "experts", "tp"])
def test_two_ranks_read_their_own_shards_on_the_host_and_together_all_weights(tmp_path, changes):
    sleeping, _ = run_both(tmp_path, rank_child.read_asleep, changes=changes)
    for shares in zip(*(mine["shares"] for mine in sleeping), strict=True):
        assert sum(shares) == 2 if "tp" in changes else max(shares) < 0.6 and abs(sum(shares) - 1) < 1e-6


def test_a_buffer_for_which_one_rank_alone_asks_is_reloaded_on_both_which_the_other_says(tmp_path):
    for rank, mine in enumerate(run_both(tmp_path, rank_child.wake_adapters, changes={"frozen": True})[0]):
        assert mine["woke"] == 3 * [[] if rank == 0 else ["params"]]


def test_ranks_keep_to_the_least_limit_of_host_memory_that_any_is_given(tmp_path):
    limits = [1e-3, 2e-4]
    own = [{"config": rank_child.CONFIG, "host_memory_limit_gib": limit} for limit in limits]
    for mine in run_both(tmp_path, rank_child.sleep_within, changes={"experts": True}, own=own)[0]:
        assert 0 < mine["taken"] <= limits[1] * 2**30 and mine["stays"] > 0


@pytest.mark.parametrize("changes", [{"overlap_param_gather": True, "overlap_grad_reduce": True}, {"tp": 2}, {"pp": 2}])
def test_two_ranks_that_swap_weights_are_bitwise_resident_ones_and_copy_their_shards(tmp_path, changes):
    for mine in run_both(tmp_path, rank_child.train_and_swap, changes=changes)[0]:
        unchanged, asleep, *later = mine["swapped"]
        assert unchanged == 0 < asleep
        for awake, alone in zip(*[iter(later)] * 2, strict=True):
            assert awake == 2 * alone == 2 * asleep


def test_masters_that_one_rank_alone_packs_bring_weights_on_both_and_change_no_bit(tmp_path):
    own = [{}, {"config": rank_child.PACKED}]
    for mine in run_both(tmp_path, rank_child.sleep_in_parts, own=own)[0]:
        assert mine["away"] == 3 * [["grads"]]


def test_two_ranks_that_step_in_the_context_are_bitwise_resident_ones(tmp_path):
    changes = {"experts": True, "found_inf_steps": (2,)}
    for mine, theirs in zip(*run_both(tmp_path, rank_child.train_in_context, changes=changes), strict=True):
        assert max(mine["held"]) == 0 < max(theirs["held"])


@pytest.mark.parametrize(("stage", "dp"), [(0, 1), (1, 1), (0, 2)])
def test_a_stage_in_which_nothing_trains_sleeps_and_the_ranks_are_bitwise_resident_ones(tmp_path, stage, dp):
    run_both(tmp_path, rank_child.train_and_sleep, ranks=2 * dp, changes={"pp": 2, "frozen_stage": stage})


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_in_which_nothing_trains_trains_saves_and_loads_with_the_flag_as_without(tmp_path, stage):
    seen = {}
    for offload in (False, True):
        for loads in (None, tmp_path / f"{offload}-None" / "trained"):
            folder = tmp_path / f"{offload}-{loads and loads.name}"
            # mcore itself saves no stage without states in the fully reshardable kind.
            job = rank_child.Job(folder, 2, offload, loads, 3, {"pp": 2, "frozen_stage": stage}, "dp_reshardable")
            seen[offload, loads is None] = children.run_ranks(rank_child.train, job)
    for is_first in (True, False):
        for mine, theirs in zip(seen[True, is_first], seen[False, is_first], strict=True):
            assert mine["numbers"] == theirs["numbers"] and mine["digests"] == theirs["digests"]
        assert [max(mine["held"]) for mine in seen[True, is_first]] == [0, 0]
        assert sum(max(theirs["held"]) for theirs in seen[False, is_first]) > 0
