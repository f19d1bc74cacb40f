"""What a training job is, found out from its config without running it."""
