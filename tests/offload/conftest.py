"""Trainings of this folder have small parts, and end with the bits of twins that were never offloaded."""

import pytest
from fake_training import Training, use_small_parts


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    use_small_parts(monkeypatch)


@pytest.fixture(autouse=True)
def trainings_end_with_the_bits_of_twins(small_parts, monkeypatch):
    """Check each training that the test has made, but for those whose states an error has torn or lost."""
    monkeypatch.setattr(Training, "made", made := [])
    yield
    for training in made:
        if not (training.engine.is_torn or training.engine.is_lost):
            training.check()
