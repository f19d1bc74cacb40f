"""The only place that touches Bridge and mcore: a declarative table of patches, and what they call."""
