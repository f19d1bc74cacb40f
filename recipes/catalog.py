"""The recipes: which of Bridge's builders each is, on how many GPUs, and what it needs. No torch here."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

GPUS_A_NODE = 4
"""GPUs of a GB200 or GB300 node: two Grace CPUs with two GPUs each."""

ENVIRONMENT_FILE = Path(__file__).with_name("environment.json")


@dataclass(frozen=True)
class Recipe:
    """One of Bridge's pretraining recipes, or `tiny`, which is this project's own."""

    name: str
    gpus: int  # that the builder's parallel layout is for
    builder: str  # `module:function` within `megatron.bridge`, a function that takes nothing; "" for `tiny`
    hf_model: str  # the Hugging Face model whose config the builder reads; "" for `tiny`
    benchmark: bool = False  # whether it measures speed: no checkpoints, 50 steps, MoE routers forced to balance
    mcore_module: str | None = None  # of Megatron-LM's `dev` branch alone, without which the model cannot be built
    system: str = "GB200"  # whose GPUs the builder is for
    step: str = "training.gpt_step"  # the module within `megatron.bridge` whose `forward_step` trains it

    @property
    def is_of_racks(self) -> bool:
        """Whether nodes of the system share NVLink; `tiny` is for any."""
        return self.system != "B300"

    @property
    def gpus_a_node(self) -> int:
        """GPUs of a node of the system."""
        return GPUS_A_NODE if self.is_of_racks else 8

    @property
    def environment(self) -> dict[str, str]:
        """The process environment that upstream's builder asks for (its `cfg.env_vars`), as strings."""
        return environments()[self.name]


SYSTEMS = {"": "GB200", "_gb300": "GB300", "_b300": "B300"}
"""By the end of a recipe's name, where there is one for each."""
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
    *(Recipe(f"gpt_oss_120b_64gpu{suffix}", 64,
        f"perf_recipes.gpt_oss.{system.lower()}.gpt_oss:gpt_oss_120b_pretrain_64gpu_{system.lower()}_bf16_config",
        "openai/gpt-oss-120b", benchmark=True, system=system) for suffix, system in SYSTEMS.items()),
    *(Recipe(f"kimi_k2_256gpu{suffix}", 256,
        f"perf_recipes.kimi.{system.lower()}.kimi_k2:kimi_k2_pretrain_256gpu_{system.lower()}_bf16_config",
        "moonshotai/Kimi-K2-Instruct", benchmark=True, system=system) for suffix, system in SYSTEMS.items()),
    Recipe("glm52_192gpu", 192,
        "recipes.glm.gb200.glm5:glm52_pretrain_192gpu_gb200_bf16_config",
        "zai-org/GLM-5.2"),
    *(Recipe(f"qwen35_397b_a17b_64gpu{suffix}", 64,
        f"perf_recipes.qwen_vl.{system.lower()}.qwen35_vl:qwen35_vl_397b_a17b_pretrain_64gpu_{system.lower()}_bf16_config",
        "Qwen/Qwen3.5-397B-A17B", benchmark=True, system=system, step="models.qwen_vl.qwen3_vl_step")
        for suffix, system in SYSTEMS.items()),
    Recipe("dsv4_pro_256gpu_gb300", 256,
        "perf_recipes.deepseek.gb300.deepseek_v4:deepseek_v4_pro_pretrain_256gpu_gb300_fp8mx_config",
        "deepseek-ai/DeepSeek-V4-Pro", benchmark=True, mcore_module=V4_ATTENTION, system="GB300"),
    Recipe("tiny", 1, "", "", system="GPU"),
)  # fmt: skip
RECIPES = {recipe.name: recipe for recipe in _ALL}


def find(name: str) -> Recipe:
    """Return a recipe by its name; ValueError, which names those that are near, or all, where there is none."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, cutoff=0.5) or RECIPES
        raise ValueError(f"recipe={name!r}: there is no such recipe; use one of {', '.join(near)}")
    return RECIPES[name]


@cache
def environments() -> dict[str, dict[str, str]]:
    """Return each recipe's process environment.

    Kept in a file, because a launcher needs it where neither torch nor Bridge is installed. That it is what
    Bridge's builders say is tested; `python -m recipes.config` prints it anew.
    """
    return json.loads(ENVIRONMENT_FILE.read_text())
