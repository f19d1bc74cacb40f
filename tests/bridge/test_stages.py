"""What ranks agree on for a memory budget, and by what they know their pipeline stage."""

from types import SimpleNamespace

import pytest
import torch

from bridge_fgo.bridge.optimizers import stage_of
from bridge_fgo.engines.making import agree

pytestmark = pytest.mark.usefixtures("cpu_standins")


@pytest.mark.parametrize("as_list", [False, True])
def test_the_stage_is_that_of_the_model_s_own_group_where_mcore_has_no_global_state(as_list):
    group = SimpleNamespace(rank=lambda: 3)
    chunk = SimpleNamespace(pp_group=[group, group] if as_list else group)
    assert stage_of([SimpleNamespace(model_chunks=[SimpleNamespace(), chunk])]) == 3
    assert stage_of([SimpleNamespace()]) is None


def test_each_stage_keeps_what_its_fullest_rank_can_and_the_budget_is_that_of_the_fullest_of_all(monkeypatch):
    others = [(0, 10, 70), (0, 12, 70), (1, 0, 90), (None, 50, 20)]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: len(others) + 1)

    def gather(answers, own):
        answers[:] = [*others, own]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert agree(0, 11, 60) == (10, 90)
    assert agree(1, 30, 60) == (0, 90)
    assert agree(None, 30, 60) == (30, 90)
