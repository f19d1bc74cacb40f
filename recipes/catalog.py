"""The recipes: which of Bridge's builders each is, on how many GPUs, and what it needs. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

GPUS_A_NODE = 4
"""GPUs of a GB200 node: two Grace CPUs with two GPUs each."""

ENVIRONMENT_FILE = Path(__file__).with_name("environment.json")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One of Bridge's pretraining recipes, or `tiny`, which is this project's own."""

    name: str
    gpus: int
    """GPUs that the builder's parallel layout is for."""
    builder: str
    """`module:function` within `megatron.bridge`, a function that takes nothing; "" for `tiny`."""
    hf_model: str
    """The Hugging Face model whose config the builder reads; "" for `tiny`."""
    benchmark: bool = False
    """Upstream wrote it to measure speed: no checkpoints, 50 steps, and MoE routers that are forced to balance."""
    mcore_module: str | None = None
    """A module of `megatron.core` without which the model cannot be built, on Megatron-LM's `dev` branch only."""

    @property
    def environment(self) -> dict[str, str]:
        """The process environment that upstream's builder asks for (its `cfg.env_vars`), as strings."""
        return environments()[self.name]


V4_FLASH = "deepseek-ai/DeepSeek-V4-Flash"
V4_ATTENTION = "megatron.core.transformer.experimental_attention_variant.deepseek_v4_hybrid_attention"

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="dsv4_flash_64gpu",
            gpus=64,
            builder="recipes.deepseek.gb200.deepseek_v4:deepseek_v4_flash_pretrain_64gpu_gb200_fp8mx_config",
            hf_model=V4_FLASH,
            mcore_module=V4_ATTENTION,
        ),
        Recipe(
            name="dsv4_flash_64gpu_bf16",
            gpus=64,
            builder="recipes.deepseek.gb200.deepseek_v4:deepseek_v4_flash_pretrain_64gpu_gb200_bf16_config",
            hf_model=V4_FLASH,
            mcore_module=V4_ATTENTION,
        ),
        Recipe(
            name="dsv4_flash_128gpu",
            gpus=128,
            builder="perf_recipes.deepseek.gb200.deepseek_v4:deepseek_v4_flash_pretrain_128gpu_gb200_fp8mx_config",
            hf_model=V4_FLASH,
            benchmark=True,
            mcore_module=V4_ATTENTION,
        ),
        Recipe(
            name="deepseek_v3_256gpu",
            gpus=256,
            builder="perf_recipes.deepseek.gb200.deepseek_v3:deepseek_v3_pretrain_256gpu_gb200_bf16_config",
            hf_model="deepseek-ai/DeepSeek-V3",
            benchmark=True,
        ),
        Recipe(
            name="deepseek_v3_256gpu_mxfp8",
            gpus=256,
            builder="perf_recipes.deepseek.gb200.deepseek_v3:deepseek_v3_pretrain_256gpu_gb200_fp8mx_config",
            hf_model="deepseek-ai/DeepSeek-V3",
            benchmark=True,
        ),
        Recipe(
            name="qwen3_30b_a3b_8gpu",
            gpus=8,
            builder="recipes.qwen.gb200.qwen3_moe:qwen3_30b_a3b_pretrain_8gpu_gb200_fp8mx_functional_config",
            hf_model="Qwen/Qwen3-30B-A3B",
        ),
        Recipe(
            name="qwen3_235b_a22b_64gpu",
            gpus=64,
            builder="perf_recipes.qwen.gb200.qwen3_moe:qwen3_235b_a22b_pretrain_64gpu_gb200_bf16_config",
            hf_model="Qwen/Qwen3-235B-A22B",
            benchmark=True,
        ),
        # Upstream's bf16 recipe of this size is on Megatron-FSDP, which manages the optimizer state itself.
        Recipe(
            name="llama3_70b_64gpu",
            gpus=64,
            builder="perf_recipes.llama.gb200.llama3:llama3_70b_pretrain_64gpu_gb200_fp8mx_config",
            hf_model="meta-llama/Meta-Llama-3-70B",
            benchmark=True,
        ),
        Recipe(
            name="nemotron_3_nano_8gpu",
            gpus=8,
            builder="recipes.nemotronh.gb200.nemotron_3_nano:nemotron_3_nano_pretrain_8gpu_gb200_bf16_config",
            hf_model="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        ),
        Recipe(
            name="nemotron_3_super_64gpu",
            gpus=64,
            builder="recipes.nemotronh.gb200.nemotron_3_super:nemotron_3_super_pretrain_64gpu_gb200_bf16_config",
            hf_model="nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
        ),
        Recipe(name="tiny", gpus=1, builder="", hf_model=""),
    )
}


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
