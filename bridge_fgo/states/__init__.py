"""Where states live, and how the step that updates them is split. Sources may know Megatron-Core, never Bridge."""
