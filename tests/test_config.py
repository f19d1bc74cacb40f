"""OffloadConfig: a user's mistake is a ValueError that names the setting."""

import dataclasses

import pytest

from bridge_fgo import OffloadConfig


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"engine": "fast"}, "engine"),
        ({"fraction": 0.0}, "fraction"),
        ({"fraction": 1.5}, "fraction"),
        ({"fraction": True}, "fraction"),
        ({"fraction": "half"}, "fraction"),
        ({"moments": False, "master_weights": False}, "moments"),
        ({"moments": 1}, "moments"),
        ({"master_weights": 1}, "master_weights"),
        ({"slab_bytes": 10}, "slab_bytes"),
        ({"piece_bytes": 1.5}, "piece_bytes"),
        ({"pin_memory": None}, "pin_memory"),
        ({"master_remainders": "always"}, "master_remainders"),
        ({"master_remainders": 1}, "master_remainders"),
        ({"master_remainders": True, "master_weights": False}, "master_remainders"),
    ],
)
def test_a_bad_setting_is_refused_by_name(settings, name):
    with pytest.raises(ValueError, match=rf"OffloadConfig\.{name}"):
        OffloadConfig(**settings)


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OffloadConfig().fraction = 0.5  # type: ignore[misc]


def test_settings_that_only_native_honours_are_listed():
    assert OffloadConfig().native_only_settings() == []
    assert OffloadConfig(engine="mcore", fraction=0.5).native_only_settings() == ["fraction=0.5"]


@pytest.mark.parametrize("budget", [0, -1.0, True, "40", "full", float("inf"), float("nan")])
def test_a_budget_that_is_no_positive_number_is_refused(budget):
    with pytest.raises(ValueError, match="gpu_memory_budget_gib"):
        OffloadConfig(gpu_memory_budget_gib=budget)


def test_a_budget_and_a_fraction_are_refused_together():
    with pytest.raises(ValueError, match=r"fraction=0\.5: both say how much"):
        OffloadConfig(gpu_memory_budget_gib=40.0, fraction=0.5)


def test_a_budget_is_in_gib_and_the_least_sizes_are_taken():
    assert OffloadConfig(gpu_memory_budget_gib=1.5).gpu_memory_budget_bytes == 3 * 2**29
    assert OffloadConfig(slab_bytes=2**20, piece_bytes=2**16).slab_bytes == 2**20
