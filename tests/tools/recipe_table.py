"""Keeps the table of recipes and systems anew: `python tests/tools/recipe_table.py`.

It asks the builder for every recipe, in processes that are forked from one that has Megatron imported.
"""

import re
import sys
from pathlib import Path
from typing import Any

from bridge_fgo.recipes.catalog import RECIPES
from bridge_fgo.recipes.hf_config import kept_configs
from bridge_fgo.tools.job import answers, kept_files, table, target
from bridge_fgo.tools.job.job import read_job
from bridge_fgo.tools.plan.estimate import make_estimate
from bridge_fgo.tools.plan.systems import SYSTEMS, links
from bridge_fgo.tools.plan.verdict import Verdict, verdicts

WORDS = {"fits": "fits", "fits only with the offload": "offload", "does not fit": "no", "refused": "refused"}
"""The text of a cell for each verdict of `Outcome`; any other verdict is unknown."""
LONGEST = 100
"""Characters of a reason; what follows may be in another order each time (a set of mcore's)."""
NEEDS = "needs config.json of {}, from Hugging Face: plan it with hf_config=DIR"


def names() -> dict[str, str]:
    """Return the names of all recipes, this project's first, each with the name of the function that it stands for."""
    functions, bound = target.config_functions(), target._bound()

    def origin(name: str) -> str:
        text = bound[functions[name]][name]
        return origin(text) if text in functions and text != name else name

    origins = {name: origin(name) for name in sorted(functions)}
    return {name: name for name in RECIPES} | {
        name: of
        for name, of in origins.items()
        if "-> ConfigContainer" in bound[functions[of]][of] or target.gpus_of(of) is not None
    }


def row_of(name: str) -> dict[str, Any]:
    """Return what `plan` says of a recipe on every system, or `why` it says nothing."""
    model = None if name in RECIPES else target._model_read_by(name)
    if model is not None and model not in kept_configs(planning=True):
        return {"why": NEEDS.format(model)}
    try:
        target.refuse_at_once(name)
        job = read_job(name, None, {})
        if job.bridge_refuses is not None:
            return {"why": short(name, f"Bridge refuses it: {job.bridge_refuses}")}
        estimate = make_estimate(job, job.offload, links())
    except ValueError as error:
        return {"why": short(name, str(error))}
    return {
        "gpus": job.parallel.gpus,
        "resident": estimate.resident_peak,
        "offloaded": estimate.offloaded_peak,
        "counted": estimate.knows_activations,
        "cells": [cell_of(verdict) for verdict in verdicts(estimate)],
    }


def cell_of(verdict: Verdict) -> str:
    """Return a verdict in a word, with a question mark where it is a close call."""
    word = WORDS.get(verdict.outcome, "")
    return f"{word}{table.UNKNOWN}" if verdict.close or not word else word


def short(name: str, why: str) -> str:
    """Return the beginning of a reason, without the recipe's name, this machine's folders and what is installed."""
    why = re.sub(rf"^(recipe[ =])?'?{name}'?(: | could not be built: | )", "", " ".join(why.split()))
    why = re.sub(r"\S*/site-packages/", "", why)
    why = why.replace("the installed megatron-core", f"megatron-core {answers.installed_versions()['megatron-core']}")
    if missing := re.match(r"config\.json of (\S+) is neither", why):
        return NEEDS.format(missing[1])
    return why if len(why) <= LONGEST else f"{why[:LONGEST]}..."


def main() -> None:
    """Keep the table."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from forked import ForkedBuilder

    answers.subprocess = ForkedBuilder()
    rows: dict[str, Any] = {}
    for name, of in names().items():
        rows[name] = {"as": of} if of != name else row_of(name)
        print(name, rows[name], flush=True)
    kept_files.write(table.FILE, {"versions": answers.installed_versions(), "systems": list(SYSTEMS), "rows": rows})


if __name__ == "__main__":
    main()
