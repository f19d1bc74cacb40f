"""What ranks hold without mcore: 16-bit tensors under a DistributedOptimizer, in even shares with no padding."""

from bridge_fgo.tools.job.held import Held, OptimizerStates, Tensor

MOMENTS = [("moment", name, "float32", True, False, False, False) for name in ("exp_avg", "exp_avg_sq")]


def held_in_shares(tensors: list[Tensor], ranks: int = 1, divides: bool = True) -> Held:
    """Return what ranks hold of tensors; divides: whether masters are copied to the weights part by part."""
    numel = sum(tensor.numel for tensor in tensors)
    share = left = -(-numel // ranks)
    bundles = []
    for tensor in reversed(tensors):  # as in mcore's buffers
        if left > 0:
            bundles.append([0, min(tensor.numel, left)])
        left -= tensor.numel
    kinds = [[("master", "master weight", "float32", False, True, divides, False), *MOMENTS]]
    states = OptimizerStates(divides, kinds, bundles, [])
    return Held(2 * numel, 4 * numel, 0, 0, [(2, 2 * numel, 2 * share)], [states], [[0]] * ranks)
