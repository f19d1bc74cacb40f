"""A pytest plugin for upstream's own tests: what stands in without a GPU, and this package installed where asked."""

import os

import torch

if not torch.cuda.is_available():
    from bridge_fgo.standins.hollow import import_bridge

    import_bridge()

if os.environ.get("BRIDGE_FGO_INSTALL") == "1":
    import bridge_fgo

    bridge_fgo.install()
