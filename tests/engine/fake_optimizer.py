"""A DistributedOptimizer reduced to what the engine reads, around a real torch AdamW on the CPU."""

from types import SimpleNamespace

import torch


def make_distributed_optimizer(sizes: list[int], seed: int = 0, fp32_views: int = 0) -> SimpleNamespace:
    """Return a stand-in with fp32 masters of the given sizes (elements), and native-fp32 views of the DDP buffer.

    The last `fp32_views` parameters are views of the parameter buffer, as native fp32 parameters are.
    """
    generator = torch.Generator().manual_seed(seed)
    masters = [torch.randn(size, generator=generator) for size in sizes]
    param_data = torch.randn(max(1, 8 * fp32_views), generator=generator)
    views = [param_data[8 * i : 8 * (i + 1)] for i in range(fp32_views)]
    adam = torch.optim.AdamW([{"params": [*views, *masters]}], lr=1e-2, weight_decay=0.1)
    return SimpleNamespace(
        optimizer=adam,
        shard_fp32_from_float16_groups=[masters],
        buffers=[SimpleNamespace(param_data=param_data, grad_data=torch.zeros(4))],
    )


def step(optimizer: SimpleNamespace, seed: int) -> None:
    """Run one real AdamW step with random gradients of the given seed."""
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.optimizer.step()


def state_bytes(optimizer: SimpleNamespace) -> list[bytes]:
    """Return the raw bytes of every parameter and moment, in order."""
    # Cloned first: a storage that was handed to numpy cannot be resized, so it could not be released.
    found = []
    for group in optimizer.optimizer.param_groups:
        for param in group["params"]:
            found.append(param.detach().clone().numpy().tobytes())
            state = optimizer.optimizer.state.get(param, {})
            found += [state[key].clone().numpy().tobytes() for key in sorted(state)]
    return found
