"""Which Bridge and mcore are here, and which engine serves them."""

import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from bridge_fgo.config import OffloadConfig

Choice = Literal["native", "mcore generation 1", "mcore generation 2"]

FLAG = "offload_optimizer_states"
TRANSFORMER = "transformer"
TRAINING = "megatron.bridge.training"
CHUNKED_FLAG = "chunked_optimizer_state_offload"
CHUNK_NUMEL = "offload_optimizer_states_chunk_numel"
OF_MCORE = {"optimizer_state_offload_fraction": 1.0, "optimizer_state_offload_chunk_size_mb": 0}
"""Settings of mcore's own offloader of generation 2, each with its default."""


_PACKAGES = {"megatron-bridge": "megatron.bridge", "megatron-core": "megatron.core"}


def version_of(distribution: str) -> str:
    """Return the version of a distribution without its local part, or "unknown".

    If its package is imported, the package's own: a checkout on the path may shadow an installed wheel. The local part
    is the commit of the git repository that the process runs in.
    """
    package = _PACKAGES.get(distribution)
    if package in sys.modules:
        # A leaf, which can be imported also while its package still is.
        return str(importlib.import_module(f"{package}.package_info").__version__).partition("+")[0]
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def source_of(module: str) -> Path | None:
    """Return the file of a module of Megatron's, without importing its packages, as `find_spec` would."""
    _, package, *names = module.split(".")
    spec = importlib.util.find_spec("megatron")
    tops = [Path(top, package) for top in (spec and spec.submodule_search_locations) or ()]
    # Another package of that name further down the path is not imported.
    top = next((top for top in tops if (top / "__init__.py").is_file()), None)
    if top is None:
        return None
    path = top.joinpath(*names)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def home_of(module: str) -> str:
    """Return the name of a module of Bridge's training: this one, or the same of Megatron-LM's training.

    Bridge announces that it will move there. A module has moved if the one that is left, if any, defines nothing.
    """
    other = module.replace(TRAINING, "megatron.training", 1)
    if other == module or source_of(other) is None or source_of("megatron.bridge") is None:
        return module
    left = source_of(module)
    return module if left and re.search(r"^(?:def|class) ", left.read_text(encoding="utf-8"), re.MULTILINE) else other


def mcore_version() -> str:
    """Return mcore's own version."""
    importlib.import_module("megatron.core")
    return version_of("megatron-core")


def release(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version; (0, 0) if it does not say.

    >>> release("0.6.2rc1")
    (0, 6)
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def settings_in(section: Any) -> dict[str, Any]:
    """Return a section's settings by name, of an object or as they are saved.

    A model that a builder builds, as Bridge 0.7 makes them, has most of its settings in a section `transformer`.
    """
    own = section if isinstance(section, dict) else vars(section)
    inner = own.get(TRANSFORMER)
    return own if inner is None else settings_in(inner) | own


def setting_of(section: Any, name: str, default: Any = None) -> Any:
    """Return a setting of a section, wherever `settings_in` finds it."""
    inner = getattr(section, TRANSFORMER, None)
    return getattr(section, name, default if inner is None else settings_in(inner).get(name, default))


def as_named_in(model: Any, text: str) -> str:
    """Return a text that names settings of a model as `model.NAME`, each with the section that it is in."""
    inner = getattr(model, TRANSFORMER, None)
    known = {} if inner is None else settings_in(inner)
    return re.sub(
        r"\bmodel\.(\w+)", lambda found: f"model.{TRANSFORMER}.{found[1]}" if found[1] in known else found[0], text
    )


def flag_is_set(optimizer_config: Any) -> bool:
    """Return whether an OptimizerConfig asks for the offload, in either spelling.

    Generation 2 rewrites `offload_optimizer_states=True` to its own flag and resets the former when the
    config is finalized, so both are read. Only a real True counts: a mock's attribute is not a setting.
    """
    if getattr(optimizer_config, FLAG, False) is True:
        return True
    chunked = getattr(optimizer_config, CHUNKED_FLAG, False) is True
    return chunked and getattr(optimizer_config, "optimizer_state_offload_fraction", 1.0) > 0.0


def check_flag(optimizer_config: Any) -> None:
    """Raise ValueError for a flag that would be taken for unset ("true", 1), or generation 2's own fraction of 0."""
    for name in (FLAG, CHUNKED_FLAG):
        value = getattr(optimizer_config, name, False)
        if not isinstance(value, bool) and (value is None or isinstance(value, str | int | float)):
            raise ValueError(f"optimizer.{name}={value!r}: use True or False")
        if value is True and getattr(optimizer_config, "optimizer_state_offload_fraction", 1.0) == 0.0:
            raise ValueError(
                f"optimizer.{name}=True with optimizer.optimizer_state_offload_fraction=0.0 offloads nothing: raise "
                "the fraction or leave the flag unset"
            )


def upstream_generation() -> Choice | None:
    """Return which offloader the installed mcore has, by its capabilities; None if it has none."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from bridge_fgo.engines.mcore import Generation1, Generation2

    if Generation2.is_available(DistributedOptimizer):
        return "mcore generation 2"
    if Generation1.is_available(DistributedOptimizer):
        return "mcore generation 1"
    return None


def upstream_adam_is_fused() -> bool:
    """Return whether mcore builds TE's FusedAdam, the only Adam that generation 1 takes."""
    from megatron.core.optimizer import distrib_optimizer

    return distrib_optimizer.Adam.__module__.startswith("transformer_engine")


def choose_engine(config: OffloadConfig, optimizer_config: Any) -> Choice:
    """Return the engine that serves this run; ValueError if the one asked for is missing, or ignores a setting."""
    if numel := getattr(optimizer_config, CHUNK_NUMEL, 0):
        raise ValueError(
            f"optimizer.{CHUNK_NUMEL}={numel!r}: the step in chunks of Megatron-LM #6544 is not driven; set it to 0, "
            "and use OffloadConfig(engine='native'), which steps part by part"
        )
    engine, native_only = upstream_generation(), config.native_only_settings()
    # mcore's own offloader is driven for Adam under a DistributedOptimizer alone.
    is_adam = getattr(optimizer_config, "optimizer", "adam") == "adam"
    is_adam = is_adam and getattr(optimizer_config, "use_distributed_optimizer", True) is True
    if config.engine == "mcore":
        if engine is None:
            raise ValueError(
                f"OffloadConfig.engine='mcore': megatron-core {mcore_version()} has no optimizer-state offloader; "
                "use engine='native' or 'auto'"
            )
        if native_only:
            raise ValueError(
                f"OffloadConfig.{', '.join(native_only)}: not honoured by engine='mcore'; use engine='native', or "
                f"leave the defaults (generation 2 has {' and '.join(f'optimizer.{name}' for name in OF_MCORE)} of its "
                "own)"
            )
        if not is_adam:
            raise ValueError(
                f"OffloadConfig.engine='mcore' with optimizer.optimizer={optimizer_config.optimizer!r} and "
                f"optimizer.use_distributed_optimizer={optimizer_config.use_distributed_optimizer}: mcore's offloader "
                "is driven for Adam under a DistributedOptimizer alone; use engine='native'"
            )
        if engine != "mcore generation 2" and not upstream_adam_is_fused():
            raise ValueError(
                "OffloadConfig.engine='mcore': mcore's offloader takes only Transformer Engine's FusedAdam, and this "
                "mcore builds another Adam; install transformer-engine or use engine='native'"
            )
        return engine
    for name, default in OF_MCORE.items():
        value = getattr(optimizer_config, name, default)
        if value == default:
            continue
        if engine == "mcore generation 2" and config.engine == "auto" and is_adam and not native_only:
            return engine
        raise ValueError(
            f"optimizer.{name}={value!r}: not honoured by the native engine; use OffloadConfig.fraction and "
            "OffloadConfig.slab_bytes, or engine='mcore' on an mcore that has the setting"
        )
    return "native"
