"""Hugging Face configs for Bridge's builders on a machine without network: the numbers kept in this project.

Some were not read from the release itself but put together from public sources: good enough to plan with
(`plan_only` in their files), while training asks for the release's own.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest import mock

FOLDER = Path(__file__).with_name("hf")

LOADER = "safe_load_config_with_retry"
"""Bridge's function that reads a config.json."""

Choice = Literal["auto", "hub", "kept"]
"""Where a model's config comes from. "hub": Hugging Face's cache or the network, as upstream does. "kept": this
project. "auto": the cache where it has the model, else this project, without asking the network."""


class MissingError(ValueError):
    """A model's config is neither kept here nor in Hugging Face's cache, and could not be fetched."""


@cache
def kept_configs(planning: bool = False) -> dict[str, dict[str, Any]]:
    """Return the kept configs by model: `config`, the keys of its config.json, and `source`, where they are from."""
    entries = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    return {entry["model"]: entry for entry in entries if planning or not entry.get("plan_only")}


def origin(model: str, choice: Choice, planning: bool = False) -> Literal["hub", "kept"]:
    """Return where the config of a model will come from; raise ValueError where it is to be "kept" and is not."""
    is_kept = model in kept_configs(planning)
    if choice == "kept" and not is_kept:
        raise ValueError(
            f"hf_config='kept': the numbers of {model} are not kept in this project{_for_plan(model)}; use 'hub', or "
            "the folder of its config.json"
        )
    if choice == "auto":
        return "hub" if not is_kept or in_cache(model, "config.json") else "kept"
    return choice


def in_cache(model: str, file: str) -> bool:
    """Return whether Hugging Face's cache on this machine has a file of a model."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, file), str)


def _for_plan(model: str) -> str:
    return " for training, but for plan alone" if model in kept_configs(planning=True) else ""


def fetch(model: str, planning: bool = False) -> None:
    """Have a model's config in Hugging Face's cache, unless it is kept or a folder, by asking the network once.

    Raises:
        MissingError: says which file is missing, and how to give it.
    """
    if model in kept_configs(planning) or Path(model).is_dir() or in_cache(model, "config.json"):
        return
    from huggingface_hub import constants, snapshot_download

    cached = Path(constants.HF_HUB_CACHE, f"models--{model.replace('/', '--')}")
    why = ""
    if not any(cached.glob("snapshots/*/config.json")):  # of any revision
        try:
            # Unlike for a file, this is tried once. The config of some models is a class of theirs.
            snapshot_download(model, allow_patterns=["config.json", "*.py"], etag_timeout=4)
        except (OSError, ValueError) as error:
            why = str(error).strip().partition("\n")[0]
    if not any(cached.glob("snapshots/*/config.json")):
        raise MissingError(
            f"config.json of {model} is neither kept in this project{_for_plan(model)} nor in Hugging Face's cache, "
            f"and cannot be fetched ({why}): get it where there is network (hf download {model} --include config.json "
            "'*.py' --local-dir DIR), and give hf_config=DIR"
        )


def tokenizer_to_fetch(config: Any) -> str | None:
    """Return the model whose tokenizer Bridge will ask the network for; None where it need not."""
    model = config.tokenizer.tokenizer_model
    if config.tokenizer.tokenizer_type != "HuggingFaceTokenizer" or Path(model).is_dir():
        return None
    return None if any(in_cache(model, file) for file in ("tokenizer.json", "tokenizer_config.json")) else model


def without_tokenizer(config: Any, model: str) -> str:
    """Return the overrides that have a recipe of a kept model train on Bridge's made-up data with no tokenizer."""
    size = config.model.vocab_size or kept_configs()[model]["config"]["vocab_size"]
    return f"tokenizer.tokenizer_type=NullTokenizer tokenizer.vocab_size={size}"


@contextlib.contextmanager
def served(choice: Choice | Path, planning: bool = False) -> Iterator[list[Any]]:
    """Context in which Bridge's `AutoBridge.from_hf_pretrained` gets configs as `choice` says, or any from that folder.

    Only the loading of `config.json` is replaced; all that Bridge makes of it is Bridge's own. Yields a list of the
    configs that were read.
    """
    from megatron.bridge.models.conversion import auto_bridge
    from transformers import CONFIG_MAPPING, AutoConfig

    # A few of Bridge's recipes ask transformers themselves; a folder is what they get too.
    owner, name = (AutoConfig, "from_pretrained") if isinstance(choice, Path) else (auto_bridge, LOADER)
    upstream = getattr(owner, name)
    read: list[Any] = []

    def load(path: str | Path, trust_remote_code: bool = False, **kwargs: Any) -> Any:
        if isinstance(choice, Path) or origin(str(path), choice, planning) == "hub":
            if choice == "auto":
                fetch(str(path), planning)
            folder = choice if isinstance(choice, Path) else path
            read.append(upstream(folder, trust_remote_code=trust_remote_code, **kwargs))
        else:
            config = kept_configs(planning)[str(path)]["config"]
            read.append(CONFIG_MAPPING[config["model_type"]].from_dict(dict(config), **kwargs))
        return read[-1]

    with mock.patch.object(owner, name, load):
        yield read
