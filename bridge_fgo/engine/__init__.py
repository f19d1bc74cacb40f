"""The native engine: planning, memory, transfers and residency. It knows nothing of Bridge."""
