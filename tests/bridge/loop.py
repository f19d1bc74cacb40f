"""Bridge's real train_step with everything around it mocked, recording the order of calls."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch

from bridge_fgo.bridge.session import SESSION
from bridge_fgo.engines.engine import Engine
from bridge_fgo.memory.meters import Traffic


def noted(word):
    """Return a verb that only writes down a word."""
    return lambda engine, *args, **how: engine.events.append(word)


class RecordingEngine(Engine):
    """An engine that moves nothing and writes down every verb."""

    name = "native"
    state_bytes = planned_bytes = 100
    pinned_bytes = 0

    def __init__(self, sources, events, freed=100):
        self.sources, self.events, self.freed = sources, events, freed
        self.traffic = Traffic()

    def existing_bytes(self):
        return 100

    def release(self):
        self.events.append("release")
        self.traffic.most_released = self.freed

    @contextmanager
    def stepping(self, source):
        self.events.append("stepping")
        yield

    begin_pass, reload, settle, close = map(noted, ("offload", "reload", "settle", "close"))
    require_readable, require_writable, states_replaced = map(noted, ("readable", "writable", "replaced"))


class Loop:
    """One training step through Bridge's `train_step`; `events` holds the order of calls.

    passes: how many forward-backward passes the rerun machine grants a step.
    flag: the value of `cfg.optimizer.offload_optimizer_states`, or None for a config without the attribute.
    """

    def __init__(self, monkeypatch, bridge_train, flag=True, passes=1, mxfp8=False, chunks=1, freed=100):
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        self.events = []
        self.bridge_train = bridge_train
        self.leaf = make_leaf(DistributedOptimizer, self.events)
        self.optimizer = make_chain([self.leaf], self.leaf.config)
        monkeypatch.setattr(
            "bridge_fgo.bridge.session.make_engine",
            lambda name, sources, *how: RecordingEngine(sources, self.events, freed),
        )
        self.optimizer_config = self.leaf.config
        if flag is None:
            del self.optimizer_config.offload_optimizer_states
        else:
            self.optimizer_config.offload_optimizer_states = flag
        self.optimizer_config.reuse_grad_buf_for_mxfp8_param_ag = mxfp8
        self.bound_finalize = mock.Mock(side_effect=lambda *a, **k: self.events.append("finalize"))
        self.model_config = SimpleNamespace(
            finalize_model_grads_func=self.bound_finalize, seq_length=8, cuda_graph_impl="none"
        )
        self.model = [self._chunk() for _ in range(chunks)]
        self.machine = mock.Mock(**{"should_checkpoint_and_exit.return_value": (False, False, 0)})
        self.machine.should_run_forward_backward.side_effect = ([True] * passes + [False]) * 50
        train = SimpleNamespace(
            empty_unused_memory_level=0, micro_batch_size=1, check_optimizer_step_success=False,
            skip_sync_grad_norm_across_mp=True,
        )  # fmt: skip
        self.cfg = SimpleNamespace(
            optimizer=self.optimizer_config, train=train, ddp=SimpleNamespace(overlap_param_gather=mxfp8),
            model=SimpleNamespace(seq_length=8), dataset=SimpleNamespace(dataloader_type="single"),
            dist=SimpleNamespace(use_decentralized_pg=True), logger=SimpleNamespace(tensorboard_log_interval=1),
            checkpoint=SimpleNamespace(save=None), data_parallel_size=1,
        )  # fmt: skip
        self.state = SimpleNamespace(
            cfg=self.cfg, timers=mock.MagicMock(), train_state=SimpleNamespace(step=0),
            tensorboard_logger=None, wandb_logger=None,
        )  # fmt: skip

    def _chunk(self):
        marks = {"remove_forward_pre_hook_handles": {"hook": 1}, "module": None, "modules": list}
        chunk = mock.Mock(config=self.model_config, **marks)
        chunk.zero_grad_buffer.side_effect = lambda: self.events.append("zero_grad_buffer")
        return chunk

    def forward_backward(self, **kwargs):
        """Stand for mcore's schedule: run, then call the bound finalize once."""
        self.events.append("forward_backward")
        if self.model_config.finalize_model_grads_func is not None:
            self.model_config.finalize_model_grads_func(kwargs["model"], None, pg_collection="groups")
        return [{"lm loss": torch.tensor([1.0])}]

    def fail(self, **kwargs):
        """Stand for a schedule that fails."""
        raise MemoryError("activations")

    @property
    def session(self):
        return vars(self.optimizer)[SESSION]

    def step(self, train_step=None):
        """Run one training step, by `train_step` or Bridge's; return what happened, in order."""
        from megatron.core import num_microbatches_calculator, rerun_state_machine

        one = mock.Mock(**{"get.return_value": 1})
        self.events.clear()
        with (
            mock.patch.object(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", self.machine),
            mock.patch.object(num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", one),
            mock.patch.object(self.bridge_train, "get_model_config", return_value=self.model_config),
            mock.patch("megatron.core.utils.get_model_config", return_value=self.model_config),
            mock.patch.object(self.bridge_train, "make_data_iterator_list", side_effect=lambda **k: None),
        ):
            (train_step or self.bridge_train.train_step)(
                mock.Mock(), None, self.model, self.optimizer, mock.Mock(), self.state, mock.Mock(),
                self.forward_backward, SimpleNamespace(is_pp_last_stage=True),
            )  # fmt: skip
        return list(self.events)


def make_leaf(cls, events):
    """Return a DistributedOptimizer with real methods that were replaced by recorders where they compute."""
    leaf = object.__new__(cls)
    leaf.optimizer = torch.optim.AdamW([torch.zeros(4, requires_grad=True)])
    leaf.config = SimpleNamespace(
        optimizer="adam", use_distributed_optimizer=True, optimizer_cpu_offload=False, optimizer_cuda_graph=False,
        offload_optimizer_states=True, barrier_with_L1_time=False, log_num_zeros_in_grad=False,
        exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32,
    )  # fmt: skip
    leaf.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    leaf.is_stub_optimizer = False
    leaf.buffers = [SimpleNamespace(param_data=None, grad_data=torch.zeros(1))]
    leaf._copy_main_params_to_param_buffer = lambda: events.append("mxfp8_copy")
    leaf.zero_grad = lambda set_to_none=True: events.append("zero_grad")
    leaf.step = lambda: events.append("step") or (True, 1.0, None)
    return leaf


def make_chain(children, config):
    """Return a ChainedOptimizer that steps its first child."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    chain = object.__new__(ChainedOptimizer)
    chain.chained_optimizers = children
    chain.config = config
    chain.is_stub_optimizer = all(getattr(child, "is_stub_optimizer", False) for child in children)
    chain.step = lambda: children[0].step()
    chain.zero_grad = lambda set_to_none=True: [child.zero_grad() for child in children]
    return chain
