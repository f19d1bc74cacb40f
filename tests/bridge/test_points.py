"""Points of the pass: what the hooks report, and that nothing of them stays in the model."""

import copy
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint

from bridge_fgo.bridge.points import ENOUGH_LAYERS, ModelPoints, layers
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.offload.profile import Mark


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = torch.nn.Linear(4, 4)
        self.activation = torch.nn.ReLU()

    def forward(self, *, hidden):
        return self.activation(self.attention(hidden))


class Block(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(count)])
        self.norm = torch.nn.LayerNorm(4)
        self.dropout = torch.nn.Identity()

    def forward(self, x):
        for layer in self.layers:
            x = layer(hidden=x)
        return self.dropout(self.norm(x))


class Model(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.embedding = torch.nn.Linear(4, 4)
        self.decoder = Block(count)

    def forward(self, x):
        return self.decoder(self.embedding(x))


@contextmanager
def hooked(model, points=None):
    """Hook a model for a step; gives the marks of the points that it passes."""
    marks = []
    with (points or ModelPoints()).hooked(model, lambda mark: marks.append(mark) or True):
        yield marks


def test_layers_and_the_norm_report_forward_and_backward_and_their_children_if_layers_are_few():
    """The end of the head's backward is a point too, before any layer's backward."""
    model, seen = Model(2), []
    with hooked([model]) as marks:
        model.decoder.layers[1].activation.register_full_backward_pre_hook(lambda *_: seen.append(len(marks)))
        loss = model(torch.ones(3, 4)).sum()
        assert len(marks) == 1 + 5
        loss.backward()
    assert len(marks) == 1 + 10  # the model's own input has no gradient
    assert seen == [1 + 5 + 1]

    assert len(layers(Model(2))) == 1 + 5
    assert len(layers(Model(ENOUGH_LAYERS - 1))) == 1 + 2 * (ENOUGH_LAYERS - 1) + 1
    assert len(layers(Model(ENOUGH_LAYERS))) == 1 + ENOUGH_LAYERS + 1


def test_nothing_is_hooked_that_mcore_captures_nor_children_that_keep_hooks():
    # Its CudaGraphManager allows no pre-forward hooks but DDP's on a layer that it replays, nor on what that holds.
    model = Model(3)
    graphed = model.decoder.layers[:2]
    for layer in graphed:
        layer.cudagraph_manager = object()
    inside = {id(module) for layer in graphed for module in layer.modules()}
    found = [layer.module for layer in layers(model)]
    assert not inside & {id(module) for module in found}
    assert model.decoder.layers[2] in found and model.decoder.norm in found
    with hooked([model]) as marks:
        assert not any(module._forward_pre_hooks for layer in graphed for module in layer.modules())
        model(torch.ones(3, 4)).sum().backward()
    assert len(marks) == 1 + 2 * (len(found) - 1)

    model = Model(2)
    first, second = model.decoder.layers
    second.attention = torch.nn.Sequential(second.attention)  # as mcore's SelfAttention holds its linear layers
    first.attention._fused_impl = None  # mcore's TEFusedMLP warns of hooks other than DDP's, and keeps them
    found = [layer.module for layer in layers(model)]
    assert second.attention in found and first.attention not in found


def test_without_gradients_no_backward_is_reported_and_without_a_point_or_in_a_capture_nothing():
    model = Model(1)
    with hooked(model) as marks, torch.no_grad():
        model(torch.ones(3, 4))
    assert len(marks) == 1 + 3
    model = Model(1)
    with ModelPoints().hooked([model], None):
        assert all(not module._forward_pre_hooks for module in model.modules())
    model, engine, marks = Model(2), object.__new__(NativeEngine), []
    engine.schedule = SimpleNamespace(transfers=SimpleNamespace(capturing=lambda: True), point=marks.append)
    with ModelPoints().hooked([model], engine.point):
        model(torch.ones(3, 4)).sum().backward()
    assert not marks


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_gone_after_the_step_or_its_error_and_gradients_are_the_same(fails):
    model = Model(2)
    plain = copy.deepcopy(model)
    with pytest.raises(MemoryError) if fails else nullcontext(), hooked([model]):
        model(torch.ones(3, 4)).sum().backward()
        if fails:
            raise MemoryError("activations")
    plain(torch.ones(3, 4)).sum().backward()
    assert all(not module._forward_pre_hooks for module in model.modules())
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_every_chunk_of_the_model_reports_and_a_pass_that_is_run_again_begins_with_nothing_live():
    chunks = [Model(2), Model(2)]
    with hooked(chunks) as marks:
        for chunk in chunks:
            chunk(torch.ones(3, 4))
    assert len(marks) == 2 * (1 + 5)
    assert len({mark.layer for mark in marks}) == len(marks), "no two of them have the same number"

    model, points = Model(ENOUGH_LAYERS), ModelPoints()
    with hooked([model], points) as marks:
        passes = []
        for _ in range(2):
            points.begin_pass()
            model(torch.ones(3, 4)).sum().backward()
            passes.append(marks[:])
            marks.clear()
    assert passes[0] == passes[1]


class Shared(torch.nn.Module):
    """A layer that gets a weight of another's, as an output layer does that shares the embedding's."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))
        self.layers = torch.nn.ModuleList([Output()])

    def forward(self, x):
        return self.layers[0](self.weight, x)


class Output(torch.nn.Module):
    def forward(self, weight, x):
        return x @ weight


def test_a_weight_that_goes_into_a_layer_reports_each_backward_once_and_keeps_no_hook():
    model, points, seen = Shared(), ModelPoints(), []
    for _ in range(3):
        with hooked(model, points) as marks:
            for _ in range(2):
                model(torch.ones(1, 4)).sum().backward()
            model(torch.ones(1, 4))  # whose backward does not come
        seen.append([mark.layer for mark in marks])
        assert not model.weight._backward_hooks
    model(torch.ones(1, 4)).sum().backward()
    assert seen == [[0, 1, ~1, 0, 1, ~1, 0, 1]] * 3


def test_a_backward_is_reported_by_the_first_input_with_a_gradient_and_not_if_it_is_recomputed():
    model = Model(1)
    mask, hidden, other = (torch.ones(3, 4, requires_grad=grad) for grad in (False, True, True))
    with hooked([model]) as marks:
        (hook,) = model.decoder.layers[0]._forward_pre_hooks.values()
        hook(model.decoder.layers[0], (mask,), {"hidden": hidden, "other": other})
        (mask + hidden + other).sum().backward()
    assert len(marks) == 2

    # Its input has a gradient, but the recomputed forward reports it.
    model = Model(1)
    hidden = torch.ones(3, 4, requires_grad=True)
    with hooked([model]) as marks:
        with torch.no_grad():
            model.decoder(hidden)
        forward = len(marks)
        hidden.sum().backward()
    assert len(marks) == forward == 3


def test_a_copied_hook_reports_nothing_after_the_step():
    model = Model(2)
    with hooked(model) as marks:
        (hook,) = model.decoder.layers[0]._forward_pre_hooks.values()
        kept = torch.ones(3, 4, requires_grad=True)
        hook(model.decoder.layers[0], (kept,), {})
        assert len(marks) == 1
    hook(model.decoder.layers[0], (kept,), {})
    kept.sum().backward()
    assert len(marks) == 1
    assert hook.func.__self__._point is None, "nothing of the training lives as long as the model"


def test_marks_say_which_layer_what_goes_in_and_what_is_live_recomputed_layers_once():
    model = Model(ENOUGH_LAYERS)
    nbytes = 3 * 4 * 4
    with hooked([model]) as marks:
        for _ in range(2):  # as a pipeline does: two microbatches in flight
            losses = [model(torch.ones(rows, 4)).sum() for rows in (3, 6)]
            for loss in losses:
                loss.backward()
    first, second = marks[: len(marks) // 2], marks[len(marks) // 2 :]
    batch = 2 * nbytes + nbytes  # the model's input has no backward: it counts to the end
    assert first[0] == Mark(0, nbytes, nbytes) and first[1] == Mark(1, nbytes, 2 * nbytes)
    in_flight = (1 + ENOUGH_LAYERS + 1) * 3 * nbytes
    forwards, backwards = first[: 2 * (ENOUGH_LAYERS + 2)], first[2 * (ENOUGH_LAYERS + 2) :]
    assert forwards[-1].live == in_flight == max(mark.live for mark in first)
    assert [mark.layer for mark in backwards[: ENOUGH_LAYERS + 1]] == [~i for i in range(ENOUGH_LAYERS + 1, 0, -1)]
    assert backwards[0] == Mark(~(ENOUGH_LAYERS + 1), nbytes, in_flight - nbytes) and backwards[-1].live == batch
    assert [mark[:2] for mark in second] == [mark[:2] for mark in first]

    model = Model(ENOUGH_LAYERS)

    def forward(x):
        for layer in model.decoder.layers:
            x = torch.utils.checkpoint.checkpoint(lambda x, layer=layer: layer(hidden=x), x, use_reentrant=True)
        return x

    with hooked([model]) as marks:
        for _ in range(2):
            forward(torch.ones(3, 4, requires_grad=True)).sum().backward()
    live, layer = [mark.live for mark in marks], 3 * 4 * 4
    assert max(live) == ENOUGH_LAYERS * layer and live[-1] == 0
    assert live[: ENOUGH_LAYERS + 2] == [
        *range(layer, (ENOUGH_LAYERS + 1) * layer, layer),
        *[max(live), max(live) - layer],
    ]


def test_what_is_routed_to_an_expert_is_no_shape_of_the_step():
    model = Model(2)
    for layer in model.decoder.layers:
        layer.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
    sized = {layer.module: layer.is_sized for layer in layers(model)}
    assert all(not sized[expert] for layer in model.decoder.layers for expert in layer.experts)
    assert all(sized[layer] and sized[layer.attention] for layer in model.decoder.layers)
    expert = model.decoder.layers[0].experts[1]
    with hooked([model]) as marks:
        expert(torch.ones(7, 4, requires_grad=True)).sum().backward()
    assert [(mark.nbytes, mark.live) for mark in marks] == [(0, 0), (0, 0)]
