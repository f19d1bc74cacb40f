"""Builds a recipe's configuration: upstream's, and with offload the flag.

`python -m recipes.config` prints the environments of all recipes, as `environment.json` keeps them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bridge_fgo.bridge.compat import FLAG
from bridge_fgo.recipes import catalog, hf_config
from bridge_fgo.recipes.overrides import overridden

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer


class Built(NamedTuple):
    """A configuration, and what to tell the user about it, a line each."""

    config: ConfigContainer
    notes: list[str]


def build(
    recipe: catalog.Recipe,
    *,
    offload: bool,
    hf: hf_config.Choice | Path = "auto",
    overrides: Sequence[str] = (),
    on_cpu: bool = False,
) -> Built:
    """Return the configuration of a recipe. Without offload it is upstream's, bit by bit.

    With offload it differs in `optimizer.offload_optimizer_states` alone. `overrides` are `section.field=value`, in
    Bridge's own syntax (Hydra's), and come last: one that cannot be combined with the offload is refused when training
    begins. on_cpu: see `bridge_fgo.recipes.tiny.tiny_config`; no other recipe knows it.

    Raises:
        ValueError: a Hugging Face config that is not there, see `hf_config.origin`; or an override is wrong.
    """
    import_bridge()
    notes: list[str] = []
    if not recipe.builder:
        from bridge_fgo.recipes.tiny import tiny_config

        config = tiny_config(on_cpu)
    else:
        module, function = recipe.builder.split(":")
        with hf_config.served(hf):
            functions = importlib.import_module(f"megatron.bridge.{module}")
            if not hasattr(functions, function):
                function = function.replace("_functional_config", "_config")  # what Bridge 0.7 calls it
            config = getattr(functions, function)()
        notes.append(f"config: megatron.bridge.{module}.{function}")
        if isinstance(hf, Path):
            notes.append(f"model: {hf / 'config.json'}")
        elif hf_config.origin(recipe.hf_model, hf) == "hub":
            notes.append(f"model: config.json of {recipe.hf_model} from Hugging Face")
        else:
            source = hf_config.kept_configs()[recipe.hf_model]["source"]
            notes.append(f"model: numbers of {recipe.hf_model} as kept in this project ({source})")
    if recipe.benchmark:
        notes.append("upstream's benchmark recipe: few steps, no checkpoints, balanced routers; override what you need")
    if offload:
        setattr(config.optimizer, FLAG, True)
    if overrides:
        config = overridden(config, overrides)
    if recipe.builder and hf == "auto" and (model := hf_config.tokenizer_to_fetch(config)):
        instead = hf_config.without_tokenizer(config, recipe.hf_model)
        notes.append(
            f"tokenizer: of {model}, which is not in Hugging Face's cache: needs the network; without it, on made-up "
            f"data, give {instead}"
        )
    return Built(config, notes)


def import_bridge() -> None:
    """Import Bridge, also without Transformer Engine, which a config needs not; ValueError where it is missing."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
        raise ValueError("a recipe's configuration needs megatron-bridge: pip install 'megatron-bridge>=0.6,<0.7'")
    if "megatron.bridge" not in sys.modules and importlib.util.find_spec("transformer_engine") is None:
        from bridge_fgo.tools.standins import hollow

        hollow.import_bridge()


def main() -> None:
    """Print each recipe's `env_vars`, from Bridge's builders."""
    found = {}
    with contextlib.redirect_stdout(sys.stderr):  # Bridge logs to stdout as it is imported
        import_bridge()
        for recipe in catalog.RECIPES.values():
            if recipe.hf_model and recipe.hf_model not in hf_config.kept_configs(planning=True):
                found[recipe.name] = recipe.environment  # cannot be built here: stays as it is
                continue
            with hf_config.served("kept", planning=True):
                config = build(recipe, offload=False, hf="hub").config  # "hub" is what `served` has in its place
            found[recipe.name] = {name: str(value) for name, value in config.env_vars.items()}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
