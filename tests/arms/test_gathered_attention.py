"""The arms' own attention with context parallelism: two ranks together do what one does, forward and backward."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from children import join, start

TOKENS, BATCH, HEADS, GROUPS, WIDTH = 16, 2, 4, 2, 8


def attend(rank: int, ranks: int, folder: Path) -> None:
    """Run as one rank; leave its places in the sequence, its output and its gradients in `folder`."""
    from gathered_attention import GatheredAttention, own_chunks

    store = torch.distributed.FileStore(str(folder / f"store{ranks}"), ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    group = torch.distributed.group.WORLD
    torch.manual_seed(0)
    shapes = [(TOKENS, BATCH, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    whole = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    weight = torch.randn(TOKENS, BATCH, HEADS * WIDTH, dtype=torch.float64)
    here = own_chunks(torch.arange(TOKENS), group)
    mine = [part[here].requires_grad_() for part in whole]
    attention = GatheredAttention(SimpleNamespace(kv_channels=WIDTH), pg_collection=SimpleNamespace(cp=group))
    output = attention(*mine)
    (output * weight[here]).sum().backward()
    torch.save((here, output.detach(), [part.grad for part in mine]), folder / f"{ranks}-{rank}.pt")


def together(folder: Path, ranks: int) -> list[torch.Tensor]:
    """Run the ranks; return the output and the three gradients in the sequence's order."""
    children = [start(attend, rank, ranks, folder) for rank in range(ranks)]
    assert [join(child, "in its attention") for child in children] == [0] * ranks
    parts = [torch.load(folder / f"{ranks}-{rank}.pt") for rank in range(ranks)]
    order = torch.cat([here for here, _, _ in parts]).argsort()
    columns = zip(*[(output, *gradients) for _, output, gradients in parts], strict=True)
    return [torch.cat(column)[order] for column in columns]


@pytest.mark.slow
def test_two_ranks_attend_as_one_does_and_one_as_torch_does(tmp_path):
    pytest.importorskip("megatron.core")
    alone = together(tmp_path, 1)
    for two, one in zip(together(tmp_path, 2), alone, strict=True):
        torch.testing.assert_close(two, one)
    torch.manual_seed(0)
    shapes = [(TOKENS, BATCH, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    query, key, value = (torch.randn(shape, dtype=torch.float64).permute(1, 2, 0, 3) for shape in shapes)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(alone[0], expected.permute(2, 0, 1, 3).reshape(TOKENS, BATCH, -1))
