"""The only place that patches Bridge and mcore: a declarative table of patches, and what they call."""
