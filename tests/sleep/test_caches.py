"""Caches and workspaces are freed with what needs them, and made again."""

import functools
import gc
import sys
import weakref
from types import ModuleType

import pytest
import torch

import bridge_fgo
from bridge_fgo.sleep import caches

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")

TE = "transformer_engine.pytorch."


@pytest.fixture(autouse=True)
def te(monkeypatch):
    """The module-level caches of Transformer Engine, each with a tensor; what gives a workspace."""
    base, softmax, gemm = (ModuleType(name) for name in ("base", "softmax", "gemm"))
    base._dummy_wgrads = {(4, 4): torch.zeros(4, 4)}
    softmax._default_causal_mask = {"causal": torch.zeros(4, 4)}
    gemm.get_cublas_workspace = functools.lru_cache(lambda device: torch.zeros(32))
    gemm.get_cublas_workspace(0)
    monkeypatch.setitem(sys.modules, TE + "module.base", base)
    monkeypatch.setitem(sys.modules, TE + "attention.dot_product_attention.softmax", softmax)
    monkeypatch.setitem(sys.modules, TE + "cpp_extensions.gemm", gemm)
    return base, softmax, gemm


def workspace_is_kept(gemm):
    return gemm.get_cublas_workspace.cache_info().currsize == 1


def test_weights_in_fp8_go_with_the_parameters_and_stay_within_a_step(sleeper):
    me = sleeper()
    layer = next(m for m in me.ddp.modules() if isinstance(m, torch.nn.Linear) or hasattr(m, "weight"))
    layer._fp8_workspaces = {"weight": torch.zeros(8)}
    me.res.offload("optimizer", "grads")
    assert layer._fp8_workspaces
    me.res.reload()
    me.res._memory.backwards.pending.add(id(me.ddp))  # quantized again, they might get another scale
    me.res.offload("params")
    assert layer._fp8_workspaces
    me.res.reload()
    me.res._memory.backwards.used()
    me.res.offload("params")
    assert layer._fp8_workspaces == {}
    me.res.close()


@pytest.mark.parametrize("has_graph", [False, True])
def test_what_a_backward_writes_to_goes_with_gradients_and_workspaces_at_last(sleeper, te, monkeypatch, has_graph):
    """Workspaces stay where a CUDA graph may have their addresses."""
    from megatron.core.parallel_state import get_global_memory_buffer

    monkeypatch.setattr(caches, "has_graph_memory", lambda device: has_graph)
    base, softmax, gemm = te
    me = sleeper()
    get_global_memory_buffer().get_tensor((4, 4), torch.float32, "mpu")
    me.res.offload("optimizer")
    assert base._dummy_wgrads
    me.res.offload("grads")
    assert base._dummy_wgrads == {}
    for kept in (True, has_graph):
        assert bool(softmax._default_causal_mask) == bool(get_global_memory_buffer().buffer) == kept
        assert workspace_is_kept(gemm) == kept
        me.res.offload("params")
    me.end()


def test_rotary_embeddings_go_and_are_made_again_and_a_model_that_slept_and_was_closed_is_freed():
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    model = torch.nn.Sequential(RotaryEmbedding(8, 1.0, use_cpu_initialization=True), torch.nn.Linear(2, 2))
    made = model[0](16)
    before, kept = made.clone(), weakref.ref(made)
    del made
    assert kept() is not None
    res = bridge_fgo.Residency(model)
    res.offload()
    assert kept() is None
    res.reload()
    assert torch.equal(model[0](16), before)
    res.close()
    # mcore's rotary cache refers to its module, and the Residency hangs on hooks of the model.
    gone = [weakref.ref(each) for each in (model, model[0], model[1].weight)]
    del model, res
    gc.collect()
    assert [each() for each in gone] == [None, None, None]


@pytest.mark.parametrize(("pool", "found"), [((0, 0), False), ((0, 3), True)])
def test_memory_in_a_pool_of_its_own_is_taken_for_a_graphs(monkeypatch, pool, found):
    segments = [{"device": 1, "segment_pool_id": (0, 7)}, {"device": 0, "segment_pool_id": pool}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert caches.has_graph_memory(torch.device("cuda", 0)) == found


def test_an_allocator_that_tells_of_no_graphs_may_have_some(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert caches.has_graph_memory(torch.device("cuda", 0))
