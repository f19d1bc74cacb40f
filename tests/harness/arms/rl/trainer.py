"""The policy by Bridge's setup and `train_step`, the reference model beside it, log-probabilities, and rollouts.

Those are by mcore's own inference engine, on the weights that `train_step` trains.
"""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bridge_fgo.recipes import process, tiny
from harness.arms.rl.options import RlOptions
from harness.arms.rl.task import Copying, Rollouts, grpo_loss

Batch = dict[str, torch.Tensor]


def build_config(options: RlOptions, vocab_size: int, ranks: int) -> Any:
    """Return Bridge's ConfigContainer of the policy on so many ranks, not validated; `vocab_size` is with padding."""
    from megatron.bridge.training import config as bridge
    from megatron.core.transformer.enums import AttnBackend

    on_cpu = options.device == "cpu"
    bf16: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16}
    if on_cpu:
        layers = {**tiny.ON_THE_CPU, "transformer_layer_spec": tiny.layer_spec}
        layers["attention_backend"] = AttnBackend.local  # the engine makes its attention's mask only for this one
    else:  # Transformer Engine's layers, which compute the same bits in each run
        layers = {
            "normalization": "RMSNorm",
            "activation_func": F.silu,
            "gated_linear_unit": True,
            "cross_entropy_loss_fusion": False,  # compiled by torch it ends in one of two results
            "attention_backend": AttnBackend.unfused,  # does not depend on the cuDNN that is here
            "deterministic_mode": True,
            # torch.compile makes these, and would make them anew for inference mode and for each length of its steps.
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
        }
    iterations = options.steps * options.updates
    return tiny.container(
        tiny.gpt(
            num_layers=options.layers,
            hidden_size=options.hidden,
            ffn_hidden_size=4 * options.hidden,
            num_attention_heads=options.heads,
            vocab_size=vocab_size,
            seq_length=options.sequence,
            add_bias_linear=False,
            # Dropout would have log-probabilities differ between the policy that samples and the one that is trained.
            hidden_dropout=0.0,
            tensor_model_parallel_size=options.tp,
            pipeline_model_parallel_size=options.pp,
            sequence_parallel=False,  # mcore's static engine has none
            pipeline_dtype=torch.bfloat16,
            autocast_dtype=torch.bfloat16,
            **bf16,
            **layers,
        ),
        bridge.OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.lr,
            weight_decay=0.0,
            clip_grad=1.0,
            use_distributed_optimizer=True,
            **bf16,
        ),
        bridge.DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, check_for_nan_in_grad=False
        ),
        iterations=iterations,
        batch=(options.micro_batch_size, options.sequences * (ranks // (options.tp * options.pp))),
        vocab=vocab_size,
        seed=options.seed,  # the mock data are not used: rollouts are the data
        scheduler={"lr_decay_style": "constant", "lr_decay_iters": iterations, "lr_warmup_iters": 0},
        rng=bridge.RNGConfig(seed=options.seed),
        dist=bridge.DistributedInitConfig(distributed_backend="gloo" if on_cpu else "nccl"),
        rerun_state_machine=bridge.RerunStateMachineConfig(rerun_mode="disabled"),
        checkpoint=bridge.CheckpointConfig(),
    )


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
        on_cpu = options.device == "cpu"
        join(options.device)
        process.skip_building_what_is_built()
        process.forget_attention_backend()
        cfg = build_config(options, vocab_size, torch.distributed.get_world_size())
        cfg.validate()
        self.state = GlobalState()
        self.state.cfg = cfg
        self.groups: Any = initialize.initialize_megatron(cfg, allow_no_cuda=on_cpu)
        build = partial(cfg.model.provide_distributed_model, pg_collection=self.groups, use_cpu_initialization=on_cpu)
        self.model: Any = build(ddp_config=cfg.ddp)
        self.optimizer: Any
        self.optimizer, self.scheduler = setup.setup_optimizer(cfg.optimizer, cfg.scheduler, self.model)
        # Sets `finalize_model_grads_func` too. Without it gradients are not reduced over data-parallel ranks, nor those
        # of shared embeddings over pipeline stages: nothing fails, and each rank trains a model of its own.
        setup._update_model_config_funcs(self.model, cfg.model, cfg.ddp, self.optimizer, pg_collection=self.groups)
        self.inner: Any = self.model[0].module  # without DDP, whose hooks are for training: for inference
        self.reference: Any = build(wrap_with_ddp=False)
        with torch.no_grad():
            for mine, theirs in zip(self.inner.parameters(), self.reference[0].parameters(), strict=True):
                theirs.copy_(mine)
                theirs.requires_grad_(False)
        self.reference[0].eval()
        self.device = next(self.inner.parameters()).device
        self.p2p = P2PCommunicator(pp_group=self.groups.pp, config=cfg.model)
        self._forward_backward = get_forward_backward_func(pp_size=options.pp)
        square = torch.ones(options.sequence, options.sequence, dtype=torch.bool, device=self.device)
        # True where a position must not look, (1, 1, sequence, sequence); Transformer Engine has one of its own.
        self._mask = square.triu(1)[None, None] if on_cpu else None
        self._positions = torch.arange(options.sequence, device=self.device)

    def log_probs(self, model: list[Any], rollouts: Rollouts) -> torch.Tensor:
        """Return log-probabilities of all tokens but the first by the policy or the reference model.

        They are fp32 (sequences, length of prompt and answer - 1); zeros on pipeline stages that are not the last.
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
        return -torch.cat(found) if found else torch.zeros(inputs["labels"].shape, device=self.device)

    def update(self, batch: Batch) -> dict[str, Any]:
        """Run one of Bridge's training steps; return "grad_norm", "skipped", and the last stage's "loss" and "kl"."""
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
        batch = next(data_iterator)
        positions = self._positions.expand(len(batch["tokens"]), -1)
        output = model(batch["tokens"], positions, self._mask, labels=batch["labels"])
        return output, loss or partial(grpo_loss, batch=batch, clip=self.options.clip, kl=self.options.kl)

    def close(self) -> None:
        """Tear down process groups and Bridge's global state. Idempotent."""
        from megatron.bridge.training.initialize import destroy_global_state

        destroy_global_state()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def join(device: str) -> None:
    """Join the job's process group, torchrun's or this process's own, before Bridge does: its barrier is NCCL's."""
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


class Sampler:
    """An inference engine over the modules of the policy without DDP: an update leaves no weights to bring over."""

    def __init__(self, model: Any, options: RlOptions, task: Copying) -> None:
        from megatron.core.inference.contexts import StaticInferenceContext
        from megatron.core.inference.engines import StaticInferenceEngine
        from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
        from megatron.core.inference.sampling_params import SamplingParams
        from megatron.core.inference.text_generation_controllers.text_generation_controller import (
            TextGenerationController,
        )
        from megatron.core.inference.utils import InferenceMode

        self._model, self._options, self._task = model, options, task
        self._context = StaticInferenceContext(options.sequences, options.sequence + 1)
        wrapped = GPTInferenceWrapper(model, self._context)
        # Not the dynamic engine: it asserts FlashAttention, which is not everywhere.
        with warnings.catch_warnings(action="ignore"):
            controller = TextGenerationController(wrapped, task)
            self._engine = StaticInferenceEngine(controller, random_seed=options.seed, legacy=True)
        # The engine's constructor switches on what layers take for "an inference engine is at work", and leaves it on.
        self._mode: Any = InferenceMode
        self._mode.unset_active()
        self._sampling = SamplingParams(temperature=1.0, num_tokens_to_generate=options.length)
        self._sampling.add_attributes({"no_early_termination": True})  # all answers are of one length

    def generate(self, prompts: list[str]) -> Rollouts:
        """Return an answer for each prompt, and its reward: the same on all tensor- and pipeline-parallel ranks."""
        # The engine seeds torch's default generators anew in each call, which are training's.
        devices = [torch.cuda.current_device()] if self._options.device == "cuda" else []
        _forget_positions(self._model)
        try:
            with torch.random.fork_rng(devices), self._mode.active():
                requests: Any = self._engine.generate(prompts, sampling_params=self._sampling)
        finally:
            # Autograd refuses tensors that were made in inference mode: training must not find these in a cache.
            _forget_positions(self._model)
            # Or keys, values and answers stay on the GPU, where sleeping is to free all.
            self._context.key_value_memory_dict.clear()
            self._engine.scheduler.completed_request_pool.clear()
            self._model.train()
        answers = [request.generated_tokens.tolist() for request in requests]
        texts = [self._task.detokenize(answer) for answer in answers]
        rewards = [self._task.reward(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        whole = [self._task.tokenize(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)]
        device = next(self._model.parameters()).device
        tokens = torch.tensor(whole, device=device)
        mask = torch.zeros(tokens.shape[0], tokens.shape[1] - 1, device=device)
        mask[:, -self._options.length :] = 1.0
        return Rollouts(tokens, torch.tensor(rewards, device=device), mask)


def _forget_positions(model: torch.nn.Module) -> None:
    """Clear mcore's cache of rotary embeddings."""
    for module in model.modules():
        forward: Any = type(module).forward
        if hasattr(forward, "cache_clear"):
            forward.cache_clear()
