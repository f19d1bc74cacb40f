"""The arms' own attention with context parallelism: two ranks together do what one does, forward and backward."""

from types import SimpleNamespace

import pytest
import torch
from children import Ranks, join_group, run_ranks

TOKENS, BATCH, HEADS, GROUPS, WIDTH = 16, 2, 4, 2, 8
SHAPES = [(TOKENS, BATCH, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]


def attend(rank, job):
    """Run as one rank; return its places in the sequence, and its output and gradients there."""
    from gathered_attention import GatheredAttention, own_chunks

    join_group(rank, job)
    group = torch.distributed.group.WORLD
    torch.manual_seed(0)
    whole = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    weight = torch.randn(TOKENS, BATCH, HEADS * WIDTH, dtype=torch.float64)
    here = own_chunks(torch.arange(TOKENS), group)
    mine = [part[here].requires_grad_() for part in whole]
    attention = GatheredAttention(SimpleNamespace(kv_channels=WIDTH), pg_collection=SimpleNamespace(cp=group))
    output = attention(*mine)
    (output * weight[here]).sum().backward()
    return [tensor.tolist() for tensor in (here, output, *(part.grad for part in mine))]


def together(folder, ranks):
    """Run the ranks; return the output and the three gradients in the sequence's order."""
    found = run_ranks(attend, Ranks(folder / str(ranks), ranks))
    places, *columns = (
        [torch.tensor(part, dtype=torch.float64) for part in column] for column in zip(*found, strict=True)
    )
    order = torch.cat(places).argsort()
    return [torch.cat(column)[order] for column in columns]


@pytest.mark.slow
def test_two_ranks_attend_as_one_does_and_one_as_torch_does(tmp_path):
    pytest.importorskip("megatron.core")
    alone = together(tmp_path, 1)
    for two, one in zip(together(tmp_path, 2), alone, strict=True):
        torch.testing.assert_close(two, one)
    torch.manual_seed(0)
    query, key, value = (torch.randn(shape, dtype=torch.float64).permute(1, 2, 0, 3) for shape in SHAPES)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(alone[0], expected.permute(2, 0, 1, 3).reshape(TOKENS, BATCH, -1))
