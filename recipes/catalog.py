"""The recipes: which of Bridge's builders each is, on how many GPUs, and what it needs. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

GPUS_A_NODE = 4
"""GPUs of a GB200 node: two Grace CPUs with two GPUs each."""

ENVIRONMENT_FILE = Path(__file__).with_name("environment.json")


@dataclass(frozen=True)
class Recipe:
    """One of Bridge's pretraining recipes, or `tiny`, which is this project's own.

    gpus: GPUs that the builder's parallel layout is for.
    builder: `module:function` within `megatron.bridge`, a function that takes nothing; "" for `tiny`.
    hf_model: the Hugging Face model whose config the builder reads; "" for `tiny`.
    benchmark: upstream wrote it to measure speed: no checkpoints, 50 steps, and MoE routers that are forced to balance.
    mcore_module: a module of `megatron.core` without which the model cannot be built, on Megatron-LM's `dev` branch
        only.
    """

    name: str
    gpus: int
    builder: str
    hf_model: str
    benchmark: bool = False
    mcore_module: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The process environment that upstream's builder asks for (its `cfg.env_vars`), as strings."""
        return environments()[self.name]


V4_FLASH = "deepseek-ai/DeepSeek-V4-Flash"
V4_ATTENTION = "megatron.core.transformer.experimental_attention_variant.deepseek_v4_hybrid_attention"

_ALL = (
    Recipe("dsv4_flash_64gpu", 64,
        "recipes.deepseek.gb200.deepseek_v4:deepseek_v4_flash_pretrain_64gpu_gb200_fp8mx_config",
        V4_FLASH, mcore_module=V4_ATTENTION),
    Recipe("dsv4_flash_64gpu_bf16", 64,
        "recipes.deepseek.gb200.deepseek_v4:deepseek_v4_flash_pretrain_64gpu_gb200_bf16_config",
        V4_FLASH, mcore_module=V4_ATTENTION),
    Recipe("dsv4_flash_128gpu", 128,
        "perf_recipes.deepseek.gb200.deepseek_v4:deepseek_v4_flash_pretrain_128gpu_gb200_fp8mx_config",
        V4_FLASH, benchmark=True, mcore_module=V4_ATTENTION),
    Recipe("deepseek_v3_256gpu", 256,
        "perf_recipes.deepseek.gb200.deepseek_v3:deepseek_v3_pretrain_256gpu_gb200_bf16_config",
        "deepseek-ai/DeepSeek-V3", benchmark=True),
    Recipe("deepseek_v3_256gpu_mxfp8", 256,
        "perf_recipes.deepseek.gb200.deepseek_v3:deepseek_v3_pretrain_256gpu_gb200_fp8mx_config",
        "deepseek-ai/DeepSeek-V3", benchmark=True),
    Recipe("qwen3_30b_a3b_8gpu", 8,
        "recipes.qwen.gb200.qwen3_moe:qwen3_30b_a3b_pretrain_8gpu_gb200_fp8mx_functional_config",
        "Qwen/Qwen3-30B-A3B"),
    Recipe("qwen3_235b_a22b_64gpu", 64,
        "perf_recipes.qwen.gb200.qwen3_moe:qwen3_235b_a22b_pretrain_64gpu_gb200_bf16_config",
        "Qwen/Qwen3-235B-A22B", benchmark=True),
    # Upstream's bf16 recipe of this size is on Megatron-FSDP, which manages the optimizer state itself.
    Recipe("llama3_70b_64gpu", 64,
        "perf_recipes.llama.gb200.llama3:llama3_70b_pretrain_64gpu_gb200_fp8mx_config",
        "meta-llama/Meta-Llama-3-70B", benchmark=True),
    Recipe("nemotron_3_nano_8gpu", 8,
        "recipes.nemotronh.gb200.nemotron_3_nano:nemotron_3_nano_pretrain_8gpu_gb200_bf16_config",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    Recipe("nemotron_3_super_64gpu", 64,
        "recipes.nemotronh.gb200.nemotron_3_super:nemotron_3_super_pretrain_64gpu_gb200_bf16_config",
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"),
    Recipe("tiny", 1, "", ""),
)  # fmt: skip
RECIPES = {recipe.name: recipe for recipe in _ALL}


def find(name: str) -> Recipe:
    """Return a recipe by its name.

    Raises:
        ValueError: there is no such recipe; names those that there are.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe={name!r}: there is no such recipe; use one of {', '.join(RECIPES)}")
    return RECIPES[name]


@cache
def environments() -> dict[str, dict[str, str]]:
    """Return each recipe's process environment.

    Kept in a file, because a launcher needs it where neither torch nor Bridge is installed. That it is what
    Bridge's builders say is tested; `python -m recipes.config` prints it anew.
    """
    return json.loads(ENVIRONMENT_FILE.read_text())
