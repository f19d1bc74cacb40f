"""Upstream's configurations that the recipes begin with."""

import importlib

from bridge_fgo.recipes import catalog, hf_config

UPSTREAMS = [name for name, recipe in catalog.RECIPES.items() if recipe.builder]


def upstream(name):
    """Return what Bridge's builder makes, with nothing of this package but the model's numbers."""
    module, function = catalog.find(name).builder.split(":")
    with hf_config.served("kept"):
        return getattr(importlib.import_module(f"megatron.bridge.{module}"), function)()
