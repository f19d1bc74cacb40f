"""Imports Megatron in the process that arms are forked from, without CUDA: no fork can use it once it has begun."""

import importlib
import sys
from unittest.mock import patch

import torch

sys.modules["torch_geometric"] = None  # pyright: ignore[reportArgumentType]  # modelopt imports it, and it begins CUDA
# As modelopt is imported, it asks which kernels the GPU can run.
with patch.multiple(torch.cuda, is_available=lambda: True, get_device_capability=lambda *_: (9, 0)):
    for name in (
        "megatron.bridge.training.gpt_step",
        "megatron.bridge.training.pretrain",
        "megatron.core.distributed.fsdp.src.megatron_fsdp",
        "transformer_engine.pytorch",
    ):
        importlib.import_module(name)
assert not torch.cuda.is_initialized(), "a forked process cannot begin CUDA again"
