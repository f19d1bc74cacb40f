"""Ways in which code uses a tensor: each returns something that another tensor of the same bits would give too."""

import copy
import io
import pickle

import torch

from bridge_fgo.memory.guard import class_of


def saved(value):
    torch.save(value, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def with_data(t):
    t.data = t.data.clone()
    return t.clone()


READS = {
    "sum": lambda t: t.sum(),
    "clone": lambda t: t.clone(),
    "isnan": lambda t: torch.isnan(t).any(),
    "item": lambda t: t.view(-1)[3].item(),
    "matmul": lambda t: t.view(1, -1) @ t.view(-1, 1),
    "view": lambda t: t.view(-1)[1:3].clone(),
    "detach": lambda t: t.detach() * 2,
    "data": lambda t: t.data + 1,
    "double": lambda t: t.double(),
    "to_numpy": lambda t: torch.from_numpy(t.detach().numpy().copy()),
    "copied_from": lambda t: torch.empty_like(t).copy_(t),
    "cat": lambda t: torch.cat([t.view(-1), t.view(-1)]),
    "foreach_norm": lambda t: torch.stack(torch._foreach_norm([t])),
    "keyword": lambda t: torch.add(input=t, other=1),
    "deepcopy": copy.deepcopy,
    "shallow_copy": lambda t: copy.copy(t).clone(),
    "saved": saved,
    "saved_in_a_dictionary": lambda t: saved({"a": [t]})["a"][0],
    "pickled": lambda t: pickle.loads(pickle.dumps(t)),
    "list": lambda t: torch.tensor(t.tolist()),
    "repr": lambda t: torch.tensor(list(repr(t).encode())),
    "equal": lambda t: torch.tensor(torch.equal(t, t)),
    "inference_mode": lambda t: torch.inference_mode()(lambda: t.sum())().clone(),
}
WRITES = {
    "zero": lambda t: t.zero_(),
    "add": lambda t: t.add_(0.5),
    "lerp": lambda t: t.lerp_(torch.ones_like(t), 0.25),
    "copy_to": lambda t: t.copy_(torch.full_like(t, 3.0)),
    "fill": lambda t: t.fill_(2.0),
    "set_item": lambda t: t.__setitem__(0, 7.0),
    "through_data": lambda t: t.data.mul_(0.5),
    "through_a_view": lambda t: t.view(-1)[:2].mul_(3.0),
    "foreach_add": lambda t: [torch._foreach_add_([t], 1.0)] and t,
    "out": lambda t: torch.add(torch.ones_like(t), 1.0, out=t),
    "other_memory": with_data,
}
ACCESSES = {**READS, **WRITES}


def act(access, tensor):
    with torch.no_grad():
        result = access(tensor)
    return result.clone() if isinstance(result, torch.Tensor) else result


def assert_same(access, pair):
    """Use both tensors of a pair; check that both give the same."""
    mine, of_twin = (act(access, tensor) for tensor in pair)
    if isinstance(of_twin, torch.Tensor):
        assert mine.equal(of_twin) and class_of(mine) is class_of(of_twin)
    else:
        assert mine == of_twin
