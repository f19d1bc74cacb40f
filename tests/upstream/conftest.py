"""Puts the engine tests on the path, for their stand-in optimizer."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
