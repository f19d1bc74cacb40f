"""Parts of the native engine: memory, transfers, policies, schedule. They know torch and CUDA, no Megatron, no Adam."""
