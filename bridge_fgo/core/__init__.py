"""What the native engine is made of: torch and CUDA, no Megatron and no Adam."""
