"""Sets up a process before Bridge's `pretrain()`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def forget_attention_backend() -> None:
    """Remove Transformer Engine's choice of an attention kernel from the environment.

    mcore compares it with the model's `attention_backend`, and ends the build where they differ. A container may have
    set it, or a model that was built earlier in this process.
    """
    for name in ATTENTION_VARIABLES:
        os.environ.pop(name, None)


def use_one_rank_by_default() -> None:
    """Set what Bridge's initialization reads, where unset, so that one process runs without torchrun."""
    if "RANK" in os.environ:
        return
    # Port 0: the store takes one that is free. One that was free a moment ago may be taken by now.
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def skip_building_what_is_built() -> None:
    """Keep Bridge from running `make`, for which mcore's wheel has no Makefile, where the helpers are built."""
    from megatron.bridge.training import initialize
    from megatron.core import datasets

    folder = Path(datasets.__path__[0])
    built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if built and not (folder / "Makefile").exists():
        initialize.compile_helpers = lambda: None
