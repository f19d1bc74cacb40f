"""Ranks that are forked, as the GPU lane starts them."""

import sys

import pytest
from forked import LaunchedRanks, Server

from bridge_fgo.tools.link import launcher

SERVER = Server("torch")
"""One of their own, as those of other tests import Megatron first."""

SUMS = """
import os, sys, time, torch
torch.distributed.init_process_group("gloo")
rank = torch.tensor(float(os.environ["RANK"]) + 1)
torch.distributed.all_reduce(rank)
line = f"{rank.item()} {os.environ['LOCAL_RANK']} {os.environ['GIVEN']}\\n"
print(line, end="", flush=True)  # in one piece: the other rank writes too
if sys.argv[1] == "fail" and os.environ["RANK"] == "1":
    raise SystemExit(3)
if sys.argv[1] != "end":
    time.sleep(1000)
"""


@pytest.mark.parametrize(("how", "status"), [("end", 0), ("fail", 3)])
def test_ranks_meet_and_all_end_as_soon_as_one_fails(tmp_path, how, status):
    script, log = tmp_path / "sums.py", tmp_path / "log"
    script.write_text(SUMS)
    with log.open("wb") as out:
        command = [sys.executable, *launcher(2), str(script), how]
        ranks = LaunchedRanks(SERVER, command, env={"GIVEN": how}, stdout=out)
    assert ranks.wait(timeout=60) == status
    assert sorted(log.read_text().split("\n")) == ["", f"3.0 0 {how}", f"3.0 1 {how}"]
