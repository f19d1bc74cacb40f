"""What trainings are compared by: the tensors that they end with, and the numbers of their steps."""

import torch


def assert_equal(mine, theirs):
    """Fail where tensors of the same name differ in dtype or in a bit; name those that do."""
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if mine[name].dtype != theirs[name].dtype] == []
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def trained(run, steps):
    """Train; return each step's loss and gradient norm."""
    return [(record.loss, record.grad_norm) for record in (run.step() for _ in range(steps))]
