"""`bridge-fgo plan`: a job's memory, with and without the offload, before it runs.

To be read in this order: `command`; `tools/job/job` (what a job is) and `held` (what its ranks hold, by mcore's own
objects in `tools/job/layout`); `state` (bytes of states) and `activations`; `estimate` (peaks, and what
copies cost on `systems`); `verdict`. Then what may be asked beside it: `recommend` with `compute`, `phases`;
`log` for a job that ran out of memory.
"""
