"""Rollouts by mcore's own inference engine, on the weights that `train_step` trains."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from bridge_fgo.tools.arms.rl.options import RlOptions
from bridge_fgo.tools.arms.rl.task import Copying, Rollouts


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
            # What is cached in inference mode may not be used in training: autograd refuses such tensors.
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
