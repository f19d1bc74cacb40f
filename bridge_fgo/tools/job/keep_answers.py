"""Keeps the builder's answers for this project's recipes: `python -m bridge_fgo.tools.job.keep_answers`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from bridge_fgo.recipes.catalog import RECIPES
from bridge_fgo.recipes.train import has_module
from bridge_fgo.tools.job.job import ask_builder
from bridge_fgo.tools.job.kept import FOLDER, HERE, in_json, installed_versions


def write(name: str, answer: dict[str, Any], versions: dict[str, str]) -> None:
    """Keep the builder's answer for a recipe; the same bytes for the same answer, wherever this runs."""
    text = json.dumps({"versions": versions, "answer": answer}).replace(in_json(Path.cwd()), HERE)
    (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    """Ask the builder for every recipe that the installed mcore can build, and write what it says."""
    FOLDER.mkdir(exist_ok=True)
    for recipe in RECIPES.values():
        if recipe.mcore_module is None or has_module(recipe.mcore_module):
            write(recipe.name, ask_builder(target=recipe.name), installed_versions())
            print(recipe.name)


if __name__ == "__main__":
    main()
