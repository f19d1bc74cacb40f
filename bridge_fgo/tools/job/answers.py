"""The builder's answers: asked of a process of its own, or kept in files, as building takes some 15 s.

`python -m bridge_fgo.tools.job.answers` keeps them anew for this project's recipes, with the Megatron that is
installed; a test holds them against it.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from bridge_fgo.bridge.compat import FLAG, settings_in, source_of
from bridge_fgo.bridge.settings import SETTINGS, settings_of
from bridge_fgo.config import ALWAYS, OffloadConfig
from bridge_fgo.recipes.catalog import RECIPES
from bridge_fgo.tools.job import kept_files
from bridge_fgo.tools.job.parallel import parallel_of
from bridge_fgo.tools.job.target import is_saved_config, require_saved_config
from bridge_fgo.tools.show import spinner

FOLDER = Path(__file__).with_name("kept")
DISTRIBUTIONS = ("megatron-bridge", "megatron-core")
CHANGES_NO_ANSWER = {"fraction", "gpu_memory_budget_gib", "host_memory_gib", "slab_bytes", "piece_bytes", *ALWAYS}
"""Settings of the offload that decide neither a refusal nor the engine."""
HERE = "<the folder that the job starts in>"  # Bridge puts it before the default of `checkpoint.save`; nobody reads it


def missing_packages() -> list[str]:
    """Return the Megatron packages that cannot be found here (looked for, not imported)."""
    found = importlib.util.find_spec("megatron") is not None
    packages = {"megatron-bridge": "megatron.bridge", "megatron-core": "megatron.core"}
    return [name for name, module in packages.items() if not (found and importlib.util.find_spec(module))]


def ask_builder(
    target: str | None = None,
    gpus: int | None = None,
    offload: dict[str, Any] | None = None,
    vocab_size: int | None = None,
    patches: bool = False,
    overrides: Sequence[str] | None = (),
) -> dict[str, Any]:
    """Return the answer of `bridge_fgo.tools.job.builder`; ValueError, with the end of its log, where it died."""
    request = {"target": target, "gpus": gpus, "offload": offload or {}, "vocab_size": vocab_size, "patches": patches}
    request["overrides"] = list(overrides or ())
    command = [sys.executable, "-m", "bridge_fgo.tools.job.builder", json.dumps(request)]
    with spinner(f"importing Megatron{f' and building {target} without a GPU' if target else ''}: some 15 s"):
        # mcore's messages have sets in them: with a seed of its own each process would order them otherwise.
        seeded = {**os.environ, "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            command, env=seeded, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise ValueError(f"{target or 'Megatron-Bridge'} could not be built without a GPU:\n{tail}")
    return json.loads(done.stdout)


def kept_answer(
    target: str, gpus: int | None, offload: dict[str, Any], vocab_size: int | None, overrides: Sequence[str] | None
) -> dict[str, Any] | None:
    """Return what the builder answers to the same request; None if it has to be asked.

    That is for what is no recipe of this project, for a job that differs from the recipe by more than the offload's
    flag or settings that change no answer, and where another Megatron is installed than the answer is of. Where none is
    installed, the kept one is as good as any. ValueError for two values of one setting, or one that is refused.
    """
    written = _read_overrides(overrides or ())
    if written is None or vocab_size is not None:
        return None
    flag = written.pop(FLAG, True)
    answer = _kept(target) if offload.keys() | written.keys() <= CHANGES_NO_ANSWER else None
    if answer is None or gpus not in (None, answer["gpus"]):
        return None
    settings = settings_of(SimpleNamespace(**{SETTINGS: written}), OffloadConfig(**offload))
    return answer | {"flag": flag, "settings": asdict(settings)}


def _read_overrides(overrides: Sequence[str]) -> dict[str, Any] | None:
    """Return by name what overrides set of the offload; None if one is of something else, or for Bridge to read."""
    found: dict[str, Any] = {}
    for override in overrides:
        name, _, text = override.partition("=")
        setting = name.removeprefix(f"optimizer.{SETTINGS}.")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            return None
        is_flag = name == f"optimizer.{FLAG}" and isinstance(value, bool)
        if not is_flag and (setting == name or not text or (isinstance(value, str) and value != "auto")):
            return None
        found[FLAG if is_flag else setting] = value
    return found


def kept_installation() -> dict[str, Any]:
    """Return what the builder says of the installed Megatron, where it is the one that answers are kept of; else {}."""
    answer = _kept("tiny") if installed_versions() else None
    return {} if answer is None else {name: answer[name] for name in ("mcore", "offloader", "kept_of")}


def refuse_gpus_at_once(target: str, gpus: int | None, overrides: Sequence[str] | None) -> None:
    """Raise ValueError if a saved config, or a recipe that is kept, cannot be laid out on that many GPUs.

    What passes may still be refused: only the builder knows other targets, and what overrides make of the layout.
    """
    changed = {override.lstrip("+~").partition(".")[0] for override in overrides or ()}
    if gpus is None or changed & {"model", "ddp"}:
        return
    config = config_at_once(target)
    known = {
        section: SimpleNamespace(**settings_in(config.get(section) or {}))
        for section in ("model", "ddp", "train")
        if section not in changed
    }
    if hasattr(known["model"], "tensor_model_parallel_size"):
        parallel_of(SimpleNamespace(**known), gpus)


def config_at_once(target: str) -> dict[str, Any]:
    """Return the sections of a saved config's settings, or of a recipe's that is kept; {} if they are not known."""
    return require_saved_config(Path(target)) if is_saved_config(target) else (_kept(target) or {}).get("config", {})


def _kept(target: str) -> dict[str, Any] | None:
    """Return the answer that is kept for a recipe as it is; None without one, or with another Megatron installed."""
    path = FOLDER / f"{target}.json.gz"
    if target not in RECIPES or not path.is_file():
        return None
    kept = kept_files.read(path)
    return kept["answer"] | {"kept_of": kept["versions"]} if installed_versions() in ({}, kept["versions"]) else None


def keep(name: str, answer: dict[str, Any], versions: dict[str, str]) -> None:
    """Keep the builder's answer for a recipe."""
    answer = json.loads(json.dumps(answer).replace(json.dumps(str(Path.cwd()))[1:-1], HERE))
    kept_files.write(FOLDER / f"{name}.json.gz", {"versions": versions, "answer": answer})


def installed_versions() -> dict[str, str]:
    """Return the versions of the Megatron that a job would import, or "checkout" on PYTHONPATH; {} for none."""
    found = {}
    for name in DISTRIBUTIONS:
        if (file := source_of(name.replace("-", "."))) is not None:
            found[name] = "checkout"
            with suppress(metadata.PackageNotFoundError):
                wheel = metadata.distribution(name)
                if Path(str(wheel.locate_file(name.replace("-", "/")))).resolve() == file.parent.resolve():
                    found[name] = wheel.version
    return found


def main() -> None:
    """Keep what the builder says of every recipe that the installed mcore can build."""
    FOLDER.mkdir(exist_ok=True)
    for recipe in RECIPES.values():
        answer = ask_builder(target=recipe.name)
        if "error" not in answer:  # of a model whose config is neither kept nor cached, or that needs another mcore
            keep(recipe.name, answer, installed_versions())
            print(recipe.name)


if __name__ == "__main__":
    main()
