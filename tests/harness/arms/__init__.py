"""Arms, what they record, and their runner."""
