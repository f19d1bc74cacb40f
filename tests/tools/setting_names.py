"""Keeps the names of Bridge's settings anew: `python tests/tools/setting_names.py`."""

import dataclasses
import importlib
import json
import pkgutil
import sys
import typing
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from bridge_fgo.bridge.compat import TRANSFORMER
from bridge_fgo.tools.job import answers, kept_files, names
from bridge_fgo.tools.standins import te_shapes


def of_bridge() -> names.Names:
    """Return the settings of each section of Bridge's ConfigContainer, of all classes that it may be of."""
    te_shapes.install()
    import megatron.bridge

    import bridge_fgo

    for module in pkgutil.walk_packages(megatron.bridge.__path__, "megatron.bridge.", onerror=lambda name: None):
        with suppress(Exception):  # what is not installed has no config of a recipe
            importlib.import_module(module.name)
    from megatron.bridge.training.config import ConfigContainer

    with bridge_fgo.install():
        hints = typing.get_type_hints(ConfigContainer)
        found = {field.name: fields_of(hints[field.name]) for field in dataclasses.fields(ConfigContainer)}
        found["model"] |= {TRANSFORMER: fields_of(typing.get_type_hints(model_built_by_a_builder())[TRANSFORMER])}
    return found


def model_built_by_a_builder() -> Any:
    from megatron.bridge.models.gpt.gpt_builder import GPTModelConfig

    return GPTModelConfig


def fields_of(hint: Any) -> names.Names | None:
    classes = [cls for cls in classes_of(hint) if cls.__module__.startswith("megatron.")]
    found = {field.name: None for cls in classes if dataclasses.is_dataclass(cls) for field in dataclasses.fields(cls)}
    return dict(sorted(found.items())) or None


def classes_of(hint: Any) -> Iterator[type]:
    """Yield the classes of a type hint, and all that are derived from them."""
    parts = typing.get_args(hint)
    if isinstance(hint, type) and not parts:
        yield hint
        parts = hint.__subclasses__()
    for part in parts:
        yield from classes_of(part)


if __name__ == "__main__":
    found = of_bridge()
    if sys.argv[1:] == ["--print"]:
        print(json.dumps(found))
    else:
        kept_files.write(names.FILE, {"versions": answers.installed_versions(), "names": found})
