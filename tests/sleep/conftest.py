"""Puts this folder on the path, for the training that its tests share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from caching_writer import caching_writer  # noqa: F401
from sleeping import disk, poisoned, sleeper  # noqa: F401
