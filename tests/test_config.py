"""A wrong setting is a ValueError that names it."""

import dataclasses

import numpy as np
import pytest

from bridge_fgo import OffloadConfig


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"engine": "fast"}, r"OffloadConfig\.engine"),
        *[({"fraction": value}, r"OffloadConfig\.fraction") for value in (0.0, 1.5, True, "half")],
        ({"moments": False, "master_weights": False}, r"OffloadConfig\.moments"),
        ({"moments": 1}, r"OffloadConfig\.moments"),
        ({"master_weights": 1}, r"OffloadConfig\.master_weights"),
        ({"slab_bytes": 10}, r"OffloadConfig\.slab_bytes"),
        ({"piece_bytes": 1.5}, r"OffloadConfig\.piece_bytes"),
        ({"pin_memory": None}, r"OffloadConfig\.pin_memory"),
        ({"master_remainders": "always"}, r"OffloadConfig\.master_remainders"),
        ({"master_remainders": 1}, r"OffloadConfig\.master_remainders"),
        ({"master_remainders": True, "master_weights": False}, r"OffloadConfig\.master_remainders"),
        *[({"gradients": value}, "use False, 'lazy' or True") for value in ("true", "eager", 1, None)],
        *[
            ({"gpu_memory_budget_gib": value}, "gpu_memory_budget_gib")
            for value in (0, -1.0, True, "40", "full", float("inf"), float("nan"), 10**400)
        ],
        *[
            ({name: value}, rf"OffloadConfig\.{name}=.*: use a value of Python's own types")
            for name, value in (("fraction", np.float64(0.5)), ("slab_bytes", np.int64(2**21)), ("moments", np.True_))
        ],
        *[({"host_memory_gib": value}, r"host_memory_gib=.*: use a number of GiB") for value in (0, -1.0, True, "all")],
        ({"host_memory_gib": 40.0, "gradients": True}, r"host_memory_gib=40\.0 with gradients=True: .*use 'lazy'"),
        *[({"nvme_folder": value}, "use the path of a folder") for value in ("", 3, True)],
        ({"nvme_folder": "/disk", "gradients": True}, r"nvme_folder='/disk' with gradients=True: .*use 'lazy'"),
        ({"nvme_folder": "/disk", "survive_crash": True}, r"survive_crash=True with nvme_folder='/disk': .*=None"),
        ({"gpu_memory_budget_gib": 40.0, "fraction": 0.5}, r"fraction=0\.5: both say how much"),
    ],
)
def test_a_bad_setting_is_refused_by_name(settings, named):
    with pytest.raises(ValueError, match=named):
        OffloadConfig(**settings)


def test_it_is_frozen_lists_settings_that_only_native_honours_and_takes_gib_and_the_least_sizes():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OffloadConfig().fraction = 0.5  # type: ignore[misc]
    assert OffloadConfig().native_only_settings() == []
    assert OffloadConfig(engine="mcore", fraction=0.5).native_only_settings() == ["fraction=0.5"]
    assert OffloadConfig(gpu_memory_budget_gib=1.5).gpu_memory_budget_bytes == 3 * 2**29
    assert OffloadConfig(slab_bytes=2**20, piece_bytes=2**16).slab_bytes == 2**20
