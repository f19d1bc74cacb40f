"""The mocked loop that the tests of this folder share."""

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from loop import Loop


@pytest.fixture
def make_loop(monkeypatch, bridge_train):
    """Return what makes a `Loop`."""
    return functools.partial(Loop, monkeypatch, bridge_train)


@pytest.fixture
def loop(make_loop, installed):
    """A `Loop` with the flag set and the package installed."""
    return make_loop()
