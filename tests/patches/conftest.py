"""Puts `tests/bridge` on the path, for the mocked loop, and the folder of the series' script."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "bridge"), str(TESTS.parent / "patches")]
