"""Full-iteration CUDA graphs on a CPU: what mcore's FullCudaGraphWrapper asks of CUDA, with a replay that computes."""

from contextlib import contextmanager

from bridge_fgo.bridge.points import PointHook

WARM_UP = 2


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self):
        self.run = None

    def register_generator_state(self, state):
        pass

    def replay(self):
        self.run()


class CapturedSchedule:
    """A schedule of mcore's as FullCudaGraphWrapper captures it. `modes` says how each pass ran.

    A replay runs the schedule that was captured, with the data in the static buffers. On a GPU no Python runs then, so
    nothing of this package may be there at the capture.
    """

    def __init__(self, monkeypatch, schedule, model_config):
        import torch
        from megatron.core import full_cuda_graph

        self.modes = []
        self._schedule, self._model_config, self._graph = schedule, model_config, None
        self._wrapper = full_cuda_graph.FullCudaGraphWrapper
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", self._capture)
        monkeypatch.setattr(full_cuda_graph, "get_all_rng_states", dict)
        monkeypatch.setattr(full_cuda_graph, "get_graph_pool", lambda single: None)
        for name, value in (("curr_iteration", 0), ("cuda_graph", None), ("result", None)):
            monkeypatch.setattr(self._wrapper, name, dict.fromkeys(("training", "validation"), value))
        monkeypatch.setattr(full_cuda_graph.StaticBufferLoader, "static_buffers", {"training": [], "validation": []})
        self._buffers = full_cuda_graph.StaticBufferLoader.static_buffers["training"]
        self.forward_backward = self._wrapper(self._run, cuda_graph_warmup_steps=WARM_UP)

    @contextmanager
    def _capture(self, graph, **how):
        self._graph = graph
        try:
            yield
        finally:
            self._graph = None

    def _run(self, **kwargs):
        if self._graph is None:
            self.modes.append("eager")
        else:
            self.modes.append("capture")
            self._check(kwargs["model"])
            self._graph.run = lambda: self._replay(kwargs)
        return self._schedule(**kwargs)

    def _check(self, model):
        assert not hasattr(self._model_config.finalize_model_grads_func, "__wrapped__"), "the hook of a reload"
        chunks = model if isinstance(model, list) else [model]
        hooks = [hook for chunk in chunks for one in chunk.modules() for hook in one._forward_pre_hooks.values()]
        own = [hook for hook in hooks if isinstance(getattr(getattr(hook, "func", None), "__self__", None), PointHook)]
        assert not own

    def _replay(self, kwargs):
        if self.modes[-1] != "capture":  # mcore replays what it has just captured, which on a GPU has computed nothing
            self.modes.append("replay")
            self._wrapper.result["training"] = self._schedule(**kwargs | {"data_iterator": [iter(self._buffers)]})
        else:
            self.modes[-1] = "capture and replay"
