"""Batches that are cut to several lengths in turn."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lengths import cut, in_turn, length_of


def test_steps_and_their_microbatches_take_lengths_in_turn_by_which_tokens_and_masks_are_cut_and_nothing_else():
    taken = [[length_of(step, microbatch, (512, 4096)) for microbatch in range(3)] for step in range(6)]
    assert taken[:2] == [[512, 512, 512], [4096, 4096, 4096]]
    assert taken[2:4] == [[512, 4096, 512], [4096, 512, 4096]]
    assert taken[4:] == taken[:2]
    tokens, mask = torch.arange(12).view(2, 6), torch.ones(2, 1, 6, 6)
    batch = cut({"tokens": tokens, "attention_mask": mask, "labels": None}, 4)
    assert batch["tokens"].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]] and batch["tokens"].is_contiguous()
    assert batch["attention_mask"].shape == (2, 1, 4, 4) and batch["labels"] is None


def test_a_forward_step_gets_one_cut_batch_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.num_microbatches_calculator.get_num_microbatches", lambda: 2)
    seen: list[Any] = []
    step = in_turn(lambda state, data, model: seen.append(next(data)["tokens"].shape[1]), (3, 5))
    data = iter({"tokens": torch.ones(1, 8)} for _ in range(9))
    for _ in range(8):
        step(SimpleNamespace(), data, None)
    assert seen == [3, 3, 5, 5, 3, 5, 5, 3] and len(list(data)) == 1
