"""`bridge-fgo plan`: a job's memory, with and without the offload, before it runs."""
