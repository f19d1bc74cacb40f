"""Slabs and their host memory, copies, streams and kernels: torch and CUDA, no Megatron and no Adam."""
