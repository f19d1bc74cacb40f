"""The listing of Bridge's own configs says which of them the offload accepts."""

import re
import sys
from pathlib import Path

import children
import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^ +(\d+)  (accepted|refused|Bridge refuses|not built) *(.*)$", re.MULTILINE)


@pytest.mark.slow
def test_the_counts_of_the_pages_are_those_of_the_installed_bridge():
    done = children.run_python([sys.executable, "tests/tools/reach.py"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = ROW.findall(done.stdout)
    assert rows == ROW.findall((ROOT / "tests/tools/reach.md").read_text())
    told = re.search(r"\[(\d+) of Bridge's (\d+) configs\]", (ROOT / "README.md").read_text())
    assert rows[0][1:] == ("accepted", "") and told
    assert [int(number) for number in told.groups()] == [int(rows[0][0]), sum(int(count) for count, *_ in rows)]
