"""The GPU arm that PyTorch may take no more than `ALLOWED_BYTES`, of the environment, for."""

from __future__ import annotations

import os

import torch

from bridge_fgo.tools.arms import gpu

if __name__ == "__main__":
    whole = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(int(os.environ["ALLOWED_BYTES"]) / whole)
    gpu.main()
