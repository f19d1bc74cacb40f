"""Sleeps are bitwise and return their memory.

    pytest -m gpu -n 6 --dist loadgroup tests/gpu/test_phases_on_gpu.py

A GPT of 1.6 billion parameters by mcore's own DDP, DistributedOptimizer and TE FusedAdam, or a smaller one; an arm is a
process. What was measured is printed (`-s`); `harness.sleeps` compares seconds. Without a GPU `python
tests/gpu/phases_arm.py --sleep whole` runs an arm with a tiny model on the CPU.
"""

import json
import os
from functools import cache
from typing import Any

import pytest
from gpu_lane import LEAST_RETURNED, NEEDS_CUDA, printed

RAN_ON = "one H200"

pytestmark = NEEDS_CUDA

KINDS = {
    "plain": (),
    "side_stream": ("--side-stream", "--layers", "4"),
    "precision_aware": ("--precision-aware", "--layers", "4"),
    "experts": ("--experts", "4", "--layers", "8"),
    "fp32_accumulation": ("--fp32-accumulation", "--layers", "4"),
    "fp8_delayed": ("--fp8", "delayed", "--fp8-param", "--layers", "4"),
    "fp8_current": ("--fp8", "tensorwise", "--fp8-param", "--layers", "4"),
    "fp8_blockwise": ("--fp8", "blockwise", "--fp8-param", "--layers", "4"),
    "fp8_weights_cached": ("--fp8", "delayed", "--layers", "4"),
}
WHOLE_ALONE = ("precision_aware", "fp8_delayed", "fp8_current", "fp8_blockwise", "fp8_weights_cached")
"""Kinds whose masters cannot be packed, as mcore rounds none of them, or that are one more case of what can."""


def kinds(*names: str) -> list[Any]:
    """Returns kinds as parameters, each for one worker of pytest-xdist (`--dist loadgroup`): its arms run once."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]


EXPANDABLE = "expandable_segments:True"


@cache
def arm(*options: str, allocator: str = "expandable_segments:False") -> dict[str, Any]:
    """Returns what an arm prints; each runs once. allocator: settings of PyTorch's, whatever the environment has."""
    sharing = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    return printed("phases_arm", "--sharing", sharing, *options, allocator=allocator, timeout=900)


@pytest.mark.parametrize("masters", ["whole", "packed"])
@pytest.mark.parametrize("kind", kinds(*KINDS))
def test_training_that_sleeps_is_bitwise_a_resident_one(kind: str, masters: str) -> None:
    if masters == "packed" and kind in WHOLE_ALONE:
        pytest.skip("no masters that could be packed")
    resident, sleeping = (arm("--sleep", sleep, *KINDS[kind]) for sleep in ("never", masters))
    assert sleeping["losses"] == resident["losses"]
    assert sleeping["sums"] == resident["sums"]
    weights = [sums["params"] for sums in sleeping["sums"]]
    assert len(set(weights)) == len(weights)  # training goes on


def test_expandable_segments_change_no_bit_and_all_memory_goes_to_the_driver() -> None:
    """Their pages are of 2 MiB: what is still used of a segment keeps no more than its own."""
    resident, sleeping = (arm("--sleep", sleep, "--layers", "4", allocator=EXPANDABLE) for sleep in ("never", "whole"))
    assert (sleeping["losses"], sleeping["sums"]) == (resident["losses"], resident["sums"])
    for phase in [p for p in sleeping["phases"] if p["verb"] == "offload" and not p["what"]]:
        returned, wanted = phase["after"]["free"] - phase["before"]["free"], 18 * sleeping["parameters"]
        print(f"{returned / 1e9:.2f} of {wanted / 1e9:.2f} GB returned, stays {phase['stays']}")
        print(f"{phase['copied'] / 1e9:.2f} GB in {phase['seconds']:.3f} s, {phase['seconds_by_part']}")
        assert returned >= LEAST_RETURNED * wanted
        assert phase["stays"]["allocated"] + phase["stays"]["cached"] <= (1 - LEAST_RETURNED) * wanted


@pytest.mark.parametrize("kind", kinds(*[kind for kind in KINDS if kind.startswith("fp")]))
def test_what_is_made_of_weights_and_gradients_leaves_with_them(kind: str) -> None:
    """Columnwise copies and caches of FP8 weights, and fp32 gradients: bytes beside parameters and their buffers."""
    run = arm("--sleep", "whole", *KINDS[kind])
    for phase in [p for p in run["phases"] if p["verb"] == "offload" and not p["what"]]:
        print(f"\n{kind}: caches of {phase['caches'] / 1e9:.3f} GB dropped, stays {phase['stays']}")
        assert phase["after"]["allocated"] <= (1 - LEAST_RETURNED) * 18 * run["parameters"]


@pytest.mark.parametrize("masters", ["whole", "packed"])
def test_a_sleep_gives_the_memory_to_the_driver_and_takes_the_same_each_time(masters: str) -> None:
    run = arm("--sleep", masters)
    whole = [p for p in run["phases"] if p["verb"] == "offload" and not p["what"]]
    for phase in whole:
        returned, wanted = phase["after"]["free"] - phase["before"]["free"], 18 * run["parameters"]
        print(f"\n{masters}: {returned / 1e9:.2f} of {wanted / 1e9:.2f} GB returned, {phase['after']}")
        print(f"caches of {phase['caches'] / 1e9:.3f} GB dropped; stays {phase['stays']}")
        assert returned >= LEAST_RETURNED * wanted
        assert phase["after"]["allocated"] <= (1 - LEAST_RETURNED) * wanted
    free = [phase["after"]["free"] for phase in whole]
    assert max(free) - min(free) <= 0.01 * max(free)
    assert len(set(run["pinned"])) == 1  # nothing is pinned after the beginning


def test_gradients_cross_no_link_and_parameters_alone_wake_by_their_16_bits() -> None:
    run = arm("--sleep", "whole")
    weights = 2 * run["parameters"]
    alone = [p for p in run["phases"] if p["verb"] == "reload" and p["what"] == ["params"] and "optimizer" in p["away"]]
    most, *others = sorted((phase["copied"] for phase in alone), reverse=True)
    assert len(others) == 5 and most <= 1.01 * 2 * weights  # one by whole masters: the first time that they stay away
    assert others[0] <= 1.01 * weights
    assert not any((p["copied_by_kind"] or {}).get("grads") for p in run["phases"])


def test_every_use_of_what_is_away_is_refused_by_name_and_training_goes_on_bitwise() -> None:
    """There it ends no process either."""
    sleeper, never = (arm("--sleep", sleep, "--layers", "4") for sleep in ("touched", "never"))
    print(json.dumps(sleeper["refused"], indent=1))
    assert not sleeper["others"] and len(sleeper["refused"]) > 15
    assert (sleeper["losses"], sleeper["sums"]) == (never["losses"][:3], never["sums"][2:3])


def test_weights_that_are_kept_swap_in_bitwise_and_a_choice_of_parameters_sleeps_alone() -> None:
    """A swap copies what differs, once each way."""
    small = ("--frozen", "--layers", "8")
    swapped, never = arm("--sleep", "swapped", *small), arm("--sleep", "never", "--steps", "3", *small)
    assert (swapped["losses"], swapped["sums"]) == (never["losses"], never["sums"])
    assert swapped["swapped"] == [swapped["first"]] * 2
    calls, trained, frozen = swapped["calls"], 2 * swapped["trained"], 2 * swapped["frozen"]
    for name, one in calls.items():
        print(f"{name}: {one['copied'] / 1e9:.2f} GB in {one['seconds']:.3f} s")
        print(f"  {one['freed'] / 1e9:.2f} GB freed, {one['returned'] / 1e9:.2f} GB returned")
    expected = {"keep": trained + frozen, "keep again": 0, "awake, in": 2 * trained, "asleep, in": trained + frozen}
    expected |= {"frozen out": frozen, "frozen back": frozen}
    assert {name: calls[name]["copied"] for name in expected} == pytest.approx(expected, rel=0.01)
    assert calls["frozen out"]["freed"] == -calls["frozen back"]["freed"] == frozen
    assert calls["frozen out"]["returned"] >= LEAST_RETURNED * frozen
    assert calls["asleep, out"]["returned"] >= LEAST_RETURNED * -calls["asleep, in"]["returned"] > 0
    assert calls["asleep, out"]["pinned"] - calls["drop"]["pinned"] == calls["keep"]["copied"]
