"""The policy by Bridge's setup and `train_step`, the reference model beside it, and log-probabilities by both."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from bridge_fgo.tools.arms.process_setup import forget_attention_backend, skip_building_what_is_built
from bridge_fgo.tools.arms.rl.config import build_config
from bridge_fgo.tools.arms.rl.grpo import Rollouts, grpo_loss
from bridge_fgo.tools.arms.rl.options import RlOptions

Batch = dict[str, torch.Tensor]


class Trainer:
    """A policy with its optimizer, and the model that it is held near to: a copy of what it was at first.

    Collective of all ranks: making one, and each method. One at a time in a process; `close` it before the next.
    """

    def __init__(self, options: RlOptions, vocab_size: int) -> None:
        # Through the modules, as Bridge's own setup does, so that whoever has patched a function is called.
        from megatron.bridge.training import initialize, setup
        from megatron.bridge.training.state import GlobalState
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        self.options = options
        join(options.device)
        skip_building_what_is_built()
        forget_attention_backend()
        cfg = build_config(options, vocab_size, torch.distributed.get_world_size())
        cfg.validate()
        self.state = GlobalState()
        self.state.cfg = cfg
        self.groups: Any = initialize.initialize_megatron(cfg, allow_no_cuda=options.device == "cpu")
        build = partial(
            cfg.model.provide_distributed_model,
            pg_collection=self.groups,
            use_cpu_initialization=options.device == "cpu",
        )
        self.model: Any = build(ddp_config=cfg.ddp)
        self.optimizer: Any
        self.optimizer, self.scheduler = setup.setup_optimizer(cfg.optimizer, cfg.scheduler, self.model)
        # Sets `finalize_model_grads_func` too. Without it gradients are not reduced over data-parallel ranks, nor those
        # of shared embeddings over pipeline stages: nothing fails, and each rank trains a model of its own.
        setup._update_model_config_funcs(self.model, cfg.model, cfg.ddp, self.optimizer, pg_collection=self.groups)
        self.reference: Any = build(wrap_with_ddp=False)
        self._copy_to_reference()
        self.device = next(self.model[0].parameters()).device
        self.p2p = P2PCommunicator(pp_group=self.groups.pp, config=cfg.model)
        self._forward_backward = get_forward_backward_func(pp_size=options.pp)
        square = torch.ones(options.sequence, options.sequence, dtype=torch.bool, device=self.device)
        # True where a position must not look, (1, 1, sequence, sequence); Transformer Engine has one of its own.
        self._mask = square.triu(1)[None, None] if options.device == "cpu" else None
        self._positions = torch.arange(options.sequence, device=self.device)

    @torch.no_grad()
    def _copy_to_reference(self) -> None:
        for mine, theirs in zip(self.model[0].module.parameters(), self.reference[0].parameters(), strict=True):
            theirs.copy_(mine)
            theirs.requires_grad_(False)
        self.reference[0].eval()

    @property
    def inner(self) -> Any:
        """The policy without DDP, whose hooks are for training: what an inference engine takes."""
        return self.model[0].module

    @property
    def data_rank(self) -> int:
        """This rank's number among those that train on different data."""
        return self.groups.dp.rank()

    def log_probs(self, model: list[Any], rollouts: Rollouts) -> torch.Tensor:
        """Return log-probabilities of all tokens but the first by the policy or the reference model.

        Returns:
            fp32 (sequences, length of prompt and answer - 1); zeros on pipeline stages that are not the last.
        """
        inputs = rollouts.inputs()
        with torch.no_grad():
            found = self._forward_backward(
                forward_step_func=partial(self._forward_step, loss=lambda output, **_: output.detach().float()),
                data_iterator=self._microbatches(inputs),
                model=model,
                num_microbatches=self.options.sequences // self.options.micro_batch_size,
                seq_length=self.options.sequence,
                micro_batch_size=self.options.micro_batch_size,
                forward_only=True,
                collect_non_loss_data=True,
                p2p_communicator=self.p2p,
                pg_collection=self.groups,
            )
        if not found:
            return torch.zeros(inputs["labels"].shape, device=self.device)
        return -torch.cat(found)

    def update(self, batch: Batch) -> dict[str, float]:
        """Run one of Bridge's training steps; return "loss", "kl" and "grad_norm".

        The first two are zeros on pipeline stages that are not the last.
        """
        from megatron.bridge.training import train

        losses, skipped, *_, grad_norm, _, _ = train.train_step(
            self._forward_step,
            self._microbatches(batch),  # type: ignore[reportArgumentType]
            self.model,
            self.optimizer,
            self.scheduler,
            self.state,
            self.groups,
            self._forward_backward,
            self.p2p,
        )
        self.state.train_state.step += 1
        return {
            "loss": float(losses.get("grpo loss", 0.0)),
            "kl": float(losses.get("kl", 0.0)),
            "grad_norm": float(grad_norm or 0.0),
            "skipped": bool(skipped),
        }

    def _microbatches(self, batch: Batch) -> Any:
        """Return an iterator over slices of a batch, as Bridge's `train_step` takes it."""
        from megatron.core.rerun_state_machine import RerunDataIterator

        size = self.options.micro_batch_size
        starts = range(0, self.options.sequences, size)
        return RerunDataIterator(iter([{key: value[i : i + size] for key, value in batch.items()} for i in starts]))

    def _forward_step(self, data_iterator: Any, model: Any, loss: Any = None) -> Any:
        """Bridge's forward step: the model's output and the loss function."""
        batch = next(data_iterator)
        positions = self._positions.expand(len(batch["tokens"]), -1)
        output = model(batch["tokens"], positions, self._mask, labels=batch["labels"])
        options = self.options
        return output, loss or partial(grpo_loss, batch=batch, clip=options.clip, kl=options.kl)

    def close(self) -> None:
        """Tear down process groups and Bridge's global state. Idempotent."""
        from megatron.bridge.training.initialize import destroy_global_state

        destroy_global_state()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def join(device: str) -> None:
    """Join the job's process group: torchrun's, or this process's own.

    Before Bridge does, whose barrier is one of NCCL's.
    """
    if torch.distributed.is_initialized():
        return
    backend = "gloo" if device == "cpu" else "nccl"
    if "RANK" not in os.environ:
        store: Any = torch.distributed.HashStore()  # type: ignore[reportPrivateImportUsage]
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(backend)
