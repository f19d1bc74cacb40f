"""Which of the configs that Megatron-Bridge ships the offload accepts, and why it refuses the others."""
