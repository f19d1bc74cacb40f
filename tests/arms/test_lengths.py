"""Batches that are cut to several lengths in turn."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lengths import in_turn


def test_a_forward_step_gets_one_cut_batch_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.num_microbatches_calculator.get_num_microbatches", lambda: 2)
    seen: list[Any] = []
    step = in_turn(lambda state, data, model: seen.append(next(data)["tokens"].shape[1]), (3, 5))
    data = iter({"tokens": torch.ones(1, 8)} for _ in range(9))
    for _ in range(8):
        step(SimpleNamespace(), data, None)
    assert seen == [3, 3, 5, 5, 3, 5, 5, 3] and len(list(data)) == 1
