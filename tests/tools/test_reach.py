"""The listing of Bridge's own configs says which of them the offload accepts."""

import re
import sys
from pathlib import Path

import children
import pytest
from reach import table, verdict_of

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


def test_classes_are_by_outcome_and_reason_and_what_a_function_raises_is_its_verdict():
    def recipe():
        raise FileNotFoundError("te_quant.cfg")

    verdicts = {"a": ("refused", "x.y=1 with", ""), "b": ("accepted", "", ""), "c": ("refused", "x.y=1 with", "")}
    verdicts["d"] = verdict_of(recipe)
    text = table(verdicts)
    assert text.startswith("4 config functions; 3 build\n") and "d  te_quant.cfg" in text
    rows = [("1", "accepted", ""), ("2", "refused", "x.y=1 with"), ("1", "not built", "FileNotFoundError")]
    assert ROW.findall(text) == rows
