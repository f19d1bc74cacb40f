"""The builder's answers for this project's recipes, kept in files: importing Megatron and building takes half a minute.

`python -m bridge_fgo.tools.job.keep_answers` writes them anew with the Megatron that is installed, and a test holds
them against it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bridge_fgo.recipes.catalog import RECIPES

FOLDER = Path(__file__).with_name("kept")
DISTRIBUTIONS = ("megatron-bridge", "megatron-core")
CHANGES_NO_ANSWER = {"fraction", "gpu_memory_budget_gib", "slab_bytes", "piece_bytes", "measure"}
"""Settings of the offload that decide neither a refusal nor the engine."""
HERE = "<the folder that the job starts in>"
"""Stands in a file for that folder, which Bridge puts before the default of `checkpoint.save`."""


def kept_answer(
    target: str, gpus: int | None, offload: dict[str, Any], vocab_size: int | None, overrides: Sequence[str]
) -> dict[str, Any] | None:
    """Return what `bridge_fgo.tools.job.builder` answers to the same request; None where it has to be asked.

    That is for what is no recipe of this project, for a job that differs from the recipe, and where another Megatron
    is installed than the answer is of. Where none is installed, the kept one is as good as any.
    """
    path = FOLDER / f"{target}.json.gz"
    if target not in RECIPES or not path.is_file() or overrides or vocab_size is not None:
        return None
    if not offload.keys() <= CHANGES_NO_ANSWER:
        return None
    kept = json.loads(gzip.decompress(path.read_bytes()).decode().replace(HERE, in_json(Path.cwd())))
    if gpus not in (None, kept["answer"]["gpus"]) or installed_versions() not in ({}, kept["versions"]):
        return None
    return kept["answer"] | {"kept_of": kept["versions"]}


def in_json(folder: Path) -> str:
    """Return a folder's name as it stands inside a string of JSON."""
    return json.dumps(str(folder))[1:-1]


def installed_versions() -> dict[str, str]:
    """Return the versions of the Megatron that a job would import; {} for none.

    A checkout on PYTHONPATH comes before the wheel, and has no version that could be looked up without importing it.
    """
    spec = find_spec("megatron")
    if spec is None:
        return {}
    found = {}
    for name in DISTRIBUTIONS:
        part = name.replace("-", "/")
        first = next((Path(at).parent / part for at in spec.submodule_search_locations or () if _has(at, part)), None)
        if first is None:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            found[name] = "checkout"
            continue
        of_wheel = Path(str(distribution.locate_file(part))).resolve() == first.resolve()
        found[name] = distribution.version if of_wheel else "checkout"
    return found


def _has(location: str, part: str) -> bool:
    return (Path(location).parent / part / "__init__.py").is_file()
