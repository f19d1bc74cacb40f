"""Upstream's configurations that the recipes begin with."""

import importlib

import pytest

from bridge_fgo.recipes import catalog, config, hf_config

KEPT = hf_config.kept_configs(planning=True)
UPSTREAMS = [name for name, recipe in catalog.RECIPES.items() if recipe.hf_model in KEPT]
WITH_VARIANTS = [
    pytest.param(name, marks=[pytest.mark.slow] * name.endswith(("b300", "_mxfp8", "_bf16", "_128gpu")))
    for name in UPSTREAMS
]
"""All of them; the slow lane has the further ones of a model."""


def upstream(name):
    """Return what Bridge's builder makes, with nothing of this package but the model's numbers."""
    module, function = catalog.find(name).builder.split(":")
    with hf_config.served("kept", planning=True):
        return getattr(importlib.import_module(f"megatron.bridge.{module}"), function)()


def built(name, offload):
    """Return the recipe's config, of the same numbers."""
    with hf_config.served("kept", planning=True):
        return config.build(catalog.find(name), offload=offload, hf="hub").config  # "hub" is what is served
