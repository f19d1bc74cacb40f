"""The report reads runs of W&B through its public API."""

import math
import sys
from types import SimpleNamespace

import pytest

from bridge_fgo.tools.report.runs import load

ROWS = [
    {"_step": 1, "_runtime": 0.3, "lm loss": 1.0, "lm loss vs samples": 1.0, "bridge_fgo/released_bytes": 1000},
    {"_step": 2, "_runtime": 0.4, "lm loss": "NaN", "bridge_fgo/released_bytes": 2000, "note": "text", "done": True},
    {"_step": 3, "_runtime": 0.5, "lm loss": 0.1, "bridge_fgo/released_bytes": None},
]


@pytest.fixture
def wandb(monkeypatch):
    """Stands in for the package: a server with the run "me/project/abc"."""

    class Error(Exception):
        pass

    def run(address):
        if address != "me/project/abc":
            raise Error("no such run")
        return SimpleNamespace(scan_history=lambda: iter(module.rows))

    module = SimpleNamespace(rows=ROWS, errors=SimpleNamespace(Error=Error), Api=lambda: SimpleNamespace(run=run))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_run_has_the_numbers_that_it_logged_to_the_last_bit(wandb):
    (run,) = load("wandb:me/project/abc")
    loss = run.scalars.pop("lm loss")
    assert run.scalars == {"bridge_fgo/released_bytes": {1: 1000.0, 2: 2000.0}}, "without W&B's own and over samples"
    assert (loss[1], loss[3]) == (1.0, 0.1) and math.isnan(loss[2])
    assert (run.name, run.is_fp32, run.totals) == ("abc", False, {"released_bytes": 2000.0})


def test_what_cannot_be_read_is_told_by_name(wandb, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="wandb:me/project/other: no such run"):
        load("wandb:me/project/other")
    wandb.rows = []
    with pytest.raises(ValueError, match="wandb:me/project/abc: has no number"):
        load("wandb:me/project/abc")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="needs the package wandb"):
        load("wandb:me/project/abc")
    (tmp_path / "run-abc.wandb").touch()
    for given in (tmp_path, tmp_path / "run-abc.wandb"):
        with pytest.raises(ValueError, match="`wandb sync` them, then name wandb:ENTITY/PROJECT/RUN"):
            load(given)
