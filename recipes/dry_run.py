"""Asks, in a dry run, whether training would take the job: its layout, its overrides and the offload's settings."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from bridge_fgo.bridge.compat import source_of
from bridge_fgo.recipes import catalog
from bridge_fgo.recipes.hf_config import in_cache, kept_configs

BRIDGE = "megatron.bridge"


def check(recipe: catalog.Recipe, gpus: int, offload: Sequence[str] | None, overrides: Sequence[str]) -> str | None:
    """Have `bridge-fgo plan` build the config as training would; return a note where that cannot be done here.

    A recipe as it is takes 6 s, any other job some 15 s: Megatron is imported in a process of its own. `offload`
    are options of the offload; None for a resident run.

    Raises:
        ValueError: training would refuse the job; says why.
    """
    missing = [name for name in (BRIDGE, recipe.mcore_module) if name is not None and source_of(name) is None]
    unchecked = f"layout and overrides are not checked: this machine lacks {' and '.join(missing)}"
    if recipe.mcore_module in missing:
        return unchecked
    model, is_given = recipe.hf_model, any(override.startswith("hf_config=") for override in overrides)
    if model and not is_given and model not in kept_configs(planning=True) and not in_cache(model, "config.json"):
        return f"layout and overrides are not checked: this machine lacks config.json of {model}"
    command = [sys.executable, "-m", "bridge_fgo", "plan", recipe.name, f"--gpus={gpus}", "--json", *(offload or ())]
    flag = () if offload is not None else ("optimizer.offload_optimizer_states=false",)
    done = subprocess.run([*command, *flag, *overrides], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    if missing and "--gpus" not in done.stderr:  # whether its layout divides is kept of a recipe
        return unchecked
    try:
        refusals = json.loads(done.stdout)["refusals"]
    except (json.JSONDecodeError, KeyError):
        why = done.stderr.strip().removeprefix("bridge-fgo plan: ")
        raise ValueError(f"recipe {recipe.name}: {why}") from None
    raise ValueError(f"recipe {recipe.name}: {'; '.join(refusals)}")
