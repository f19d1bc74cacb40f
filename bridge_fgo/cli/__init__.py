"""The `bridge-fgo` command line.

Kept free of imports: `bridge-fgo --help` has to answer without loading torch.
"""
