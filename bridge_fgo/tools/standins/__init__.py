"""Stand-ins for Transformer Engine and CUDA, with which Megatron runs or builds a model on a machine without a GPU."""
