"""Tools around the offload: the `bridge-fgo` command line, and stand-ins. A training job imports none.

Kept free of imports: `bridge-fgo --help` has to answer without loading torch.
"""
