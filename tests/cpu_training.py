"""A small GPT trained by Bridge's real train_step on the CPU, where wished with what can go wrong."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from cpu_model import CpuOptions, forward_backward_chunks, make_config, make_model, microbatches

import bridge_fgo
from bridge_fgo.tools.standins.cuda import fsdp_on_cpu, install_standins
from harness.arms import final_state
from harness.arms.final_state import digest

FAULT = 64.0
"""Factor by which an injected fault raises the loss: far above what validation accepts."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One training step, counted from 1. `loss` and `grad_norm` are None where Bridge gave none."""

    step: int
    loss: float | None
    grad_norm: float | None
    skipped: bool
    passes: int
    """Forward-backward passes: 2 where the rerun state machine asked for another."""
    exit_code: int | None = None
    """Status with which Bridge's loop would end the process after this step; None where it would go on."""
    should_checkpoint: bool = False
    """Whether Bridge's loop would save a checkpoint before it ends the process."""


class CpuTraining:
    """A training that can be stepped. One at a time in a process; `close` it (or use `with`) before the next.

    Deterministic: the same options give the same bytes after the same number of steps.

    Raises:
        RuntimeError: torch.distributed is initialized already, perhaps by a training that was not closed.
    """

    def __init__(self, options: CpuOptions) -> None:
        install_standins()
        if torch.distributed.is_initialized():
            raise RuntimeError("torch.distributed is initialized already: close the other training first")
        self.options = options
        self.live_bytes: list[int] = []
        """Bytes of live optimizer state as each forward of the newest step began: microbatches x chunks x
        passes samples."""
        self.steps = 0
        self.exited = False
        self._forwards = 0
        self._forwards_a_pass = options.microbatches * options.chunks
        self._stack = contextlib.ExitStack()
        try:
            if options.fsdp is not None:
                self._stack.enter_context(fsdp_on_cpu())
            self._build()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        """Make the process group: of this process alone."""
        store = torch.distributed.HashStore()  # type: ignore[reportPrivateImportUsage]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

    def _build(self) -> None:
        from megatron.bridge.training import setup as bridge_setup
        from megatron.bridge.training.initialize import init_rerun_state
        from megatron.bridge.training.state import GlobalState
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.rerun_state_machine import RerunDataIterator

        options = self.options
        self._join()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=options.tp,
            pipeline_model_parallel_size=options.pp,
            num_distributed_optimizer_instances=options.instances,
        )
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        random.seed(options.seed)
        np.random.seed(options.seed)
        torch.manual_seed(options.seed)
        tensor_parallel.model_parallel_cuda_manual_seed(options.seed)

        self.cfg = make_config(options)
        self.cfg.validate()
        self.state = GlobalState()
        self.state.cfg = self.cfg
        init_num_microbatches_calculator(
            0, None, self.cfg.train.global_batch_size, options.micro_batch_size, self.cfg.data_parallel_size
        )
        init_rerun_state(self.cfg.rerun_state_machine)
        self.model: Any = make_model(options, self.cfg, self.groups)
        # Through the module, here and below, as Bridge's own setup does, so that whoever replaced it is called.
        self.optimizer: Any
        self.optimizer, self.scheduler = bridge_setup.setup_optimizer(
            self.cfg.optimizer, self.cfg.scheduler, self.model, use_gloo_process_groups=True
        )
        bridge_setup._update_model_config_funcs(
            self.model, self.cfg.model, self.cfg.ddp, self.optimizer, pg_collection=self.groups
        )
        self._batches = RerunDataIterator(microbatches(options))
        several = options.chunks > 1
        self._schedule = forward_backward_chunks if several else get_forward_backward_func(pp_size=options.pp)
        self._p2p: Any = P2PCommunicator(self.groups.pp, self.cfg.model) if options.pp > 1 else None
        shape = (options.micro_batch_size, options.sequence)
        self._positions = torch.arange(options.sequence).expand(shape)
        # True where a position must not look: (1, 1, sequence, sequence).
        square = torch.ones(options.sequence, options.sequence, dtype=torch.bool)
        self._causal_mask = square.triu(1)[None, None]
        self._loss_mask = torch.ones(shape)

    def step(self) -> StepRecord:
        """Run one training step through Bridge's `train_step`."""
        from megatron.bridge.training import train as bridge_train

        if self.exited:
            raise RuntimeError("Bridge asked to exit in the last step: this training is over")
        self.steps += 1
        self._forwards = 0
        self.live_bytes = []
        skips_any_norm = self.steps in self.options.grad_norm_skip_steps
        self.optimizer.config.grad_norm_skip_threshold = 0.0 if skips_any_norm else math.inf
        outcome = bridge_train.train_step(
            self._forward_step, self._batches, self.model, self.optimizer, self.scheduler, self.state, self.groups,
            self._schedule, self._p2p,
        )  # fmt: skip
        losses, skipped, should_checkpoint, self.exited, exit_code, grad_norm, *_ = outcome
        self.state.train_state.step += 1
        return StepRecord(
            step=self.steps,
            loss=float(losses["lm loss"]) if losses else None,
            grad_norm=None if grad_norm is None else float(grad_norm),
            skipped=bool(skipped),
            passes=self._forwards // self._forwards_a_pass,
            exit_code=exit_code if self.exited else None,
            should_checkpoint=should_checkpoint,
        )

    def train(self, count: int) -> list[StepRecord]:
        """Run so many training steps."""
        return [self.step() for _ in range(count)]

    def _forward_step(self, data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> Any:
        """Bridge's forward step: (output, loss function).

        The output is the losses (micro_batch_size, sequence) in fp32, or of a chunk that is not the last the
        activations (sequence, micro_batch_size, hidden).
        """
        self.live_bytes.append(self.live_state_bytes())
        first_pass = self._forwards < self._forwards_a_pass
        self._forwards += 1
        batch = next(data_iterator)
        length = batch["tokens"].shape[1]
        positions, mask = self._positions[:, :length], self._causal_mask[..., :length, :length]
        output = model(batch["tokens"], positions, mask, labels=batch["labels"])
        if self.steps in self.options.found_inf_steps:
            output.register_hook(lambda gradient: gradient * math.inf)
        fatal = self.steps == self.options.checkpoint_exit_step
        fault = fatal or (first_pass and self.steps in self.options.rerun_steps)
        return output, partial(self._loss, fault=fault, fatal=fatal)

    def _loss(self, losses: torch.Tensor, *, fault: bool, fatal: bool) -> Any:
        """Bridge's loss function, and one more validation, which rejects what this vocabulary cannot give.

        Bridge's own spike check would do, but rejects nothing before it has seen a hundred losses.
        """
        from megatron.bridge.training.losses import masked_next_token_loss
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        if fault:
            losses = losses * FAULT
        loss_mask = self._loss_mask[:, : losses.shape[1]].contiguous()
        loss, tokens, report = masked_next_token_loss(loss_mask, losses)
        bound = 4.0 * math.log(self.options.vocab) * loss_mask.numel()
        get_rerun_state_machine().validate_result(
            result=loss.detach().clone(),  # mcore scales the loss in place before the second pass compares
            rejection_func=lambda value: bool(value > bound),
            message="loss above what the vocabulary allows",
            fatal=fatal,
        )
        return loss, tokens, report

    def state_tensors(self) -> dict[str, list[tuple[str, torch.Tensor]]]:
        """Return `final_state.state_tensors`: (name, tensor) by kind, each in a fixed order."""
        found = final_state.state_tensors(self.model, self.optimizer)
        return {kind: list(tensors.items()) for kind, tensors in found.items()}

    def digests(self) -> dict[str, str]:
        """Return the sha256 of the bytes of `state_tensors`, by kind."""
        bridge_fgo.reload_states()
        found = final_state.state_tensors(self.model, self.optimizer)
        return {kind: digest(tensors) for kind, tensors in found.items()}

    def live_state_bytes(self) -> int:
        """Return `final_state.live_state_bytes`."""
        return final_state.live_state_bytes(self.model, self.optimizer)

    def close(self) -> None:
        """Tear down process groups and Bridge's global state. Idempotent."""
        from megatron.bridge.training.initialize import destroy_global_state

        destroy_global_state()
        self._stack.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def __enter__(self) -> CpuTraining:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
