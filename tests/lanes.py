"""The two lanes of tests."""

import pytest


def in_lanes(rows, fast):
    """Return rows for `parametrize`: those that are not among `fast` are for the slow lane."""
    marks = {row: () if row in fast else pytest.mark.slow for row in rows}
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=marks[row]) for row in rows]
