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


def with_model(optimizer: SimpleNamespace) -> SimpleNamespace:
    """Give a stand-in the model's bf16 weights in a buffer of DDP's, and mcore's copy of masters to them."""
    masters = [master for group in optimizer.shard_fp32_from_float16_groups for master in group]
    weights = torch.zeros(sum(master.numel() for master in masters), dtype=torch.bfloat16)
    bucket = SimpleNamespace(param_data=weights)
    optimizer.buffers.append(SimpleNamespace(param_data=weights, grad_data=torch.zeros(4), buckets=[bucket]))
    models, places, first = [], {}, 0
    for master in masters:
        models.append(weights[first : first + master.numel()])
        places[id(models[-1])] = SimpleNamespace(start=first, size=master.numel())
        first += master.numel()
    optimizer.model_float16_groups = [models]
    optimizer.model_param_gbuf_map = {model: (len(optimizer.buffers) - 1, torch.bfloat16, 0) for model in models}
    optimizer._get_model_param_range_map = lambda model: {"gbuf_world_in_bucket": places[id(model)]}
    optimizer.shard_fp32_groups = optimizer.model_fp32_groups = []
    optimizer.copied = []

    def copy() -> None:
        pairs = zip(optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups, strict=True)
        for mains, of_model in pairs:
            for main, model in zip(mains, of_model, strict=True):
                model.copy_(main)
                optimizer.copied.append(id(main))

    optimizer._copy_main_params_to_model_params = copy
    copy()
    optimizer.copied.clear()
    return optimizer


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
