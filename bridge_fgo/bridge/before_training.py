"""Wrappers of the functions that run before training: validate a config, build an optimizer, set up training."""

import importlib
import inspect
import logging
from functools import partial
from typing import Any

from bridge_fgo.bridge import activation_offload
from bridge_fgo.bridge.compat import CHUNKED_FLAG, FLAG, check_flag, choose_engine, flag_is_set
from bridge_fgo.bridge.patch import Args, Kwargs, Wrapped, arguments_of
from bridge_fgo.bridge.refusals import refuse_config, refuse_optimizer_config
from bridge_fgo.bridge.session import attach, model_config_of
from bridge_fgo.bridge.settings import caller, idle_settings, settings_of, write_settings
from bridge_fgo.engines.ranks import on_every_rank
from bridge_fgo.states.inner_step import is_upstreams
from bridge_fgo.states.masters import build_groups, masters_made_late, whole_masters_made_late
from bridge_fgo.states.shadowed import shadowed

logger = logging.getLogger(__name__)


def validate_config(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Refuse what cannot be combined, once Bridge has finalized the config; write the settings in force into it."""
    # MIMO's function, whose road does not go through the container's own validation, is given the config.
    config = arguments_of(wrapped, args, kwargs)["cfg"] if instance is None else instance
    optimizer = config.optimizer
    if caller.sets_flag:
        setattr(optimizer, FLAG, True)
    result = wrapped(*args, **kwargs)
    optimizer = config.optimizer
    caller.saw_flag = caller.saw_flag or flag_is_set(optimizer)
    if caller.refuses:
        return result
    settings = settings_of(optimizer)
    refuse_config(config, settings)
    if settings.activation_waits:
        activation_offload.refuse_unwaited(getattr(config, "model", None))
        activation_offload.add_waits()
    if flag_is_set(optimizer):
        write_settings(optimizer)
    elif told := ", ".join(idle_settings(optimizer)):
        said = "bridge_fgo: optimizer.%s is not set: Bridge's train_step offloads nothing, in spite of %s"
        logger.warning(said, FLAG, told)
    return result


def build_optimizer(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Build an optimizer whose masters are never on the GPU together, and attach, if the native engine serves it.

    So a model can be built, and loaded, that fits only with its states offloaded. With an engine of mcore's
    `after_model_hooks` attaches.
    """
    arguments = arguments_of(wrapped, args, kwargs)
    config = arguments.get("optimizer_config", arguments.get("config"))
    check_flag(config)
    if not flag_is_set(config):
        return wrapped(*args, **kwargs)
    refuse_optimizer_config(config)
    settings = settings_of(config)
    if choose_engine(settings, config) != "native":
        result = wrapped(*args, **kwargs)
        _optimizer_of(result, config)
        return result
    # Hidden from mcore, which would build an offloader of its own: generation 1's constructor asserts on any Adam but
    # TE's, and generation 2's step goes through its offloader.
    hidden = {name: False for name in (FLAG, CHUNKED_FLAG) if hasattr(config, name)}
    with masters_made_late():
        with shadowed(config, hidden):
            result = wrapped(*args, **kwargs)
        optimizer = _optimizer_of(result, config)
        model = arguments.get("model", arguments.get("mimo_model"))
        if model is not None:
            engine = attach(optimizer, model_config_of({"model": model}), settings, model).engine
            on_every_rank(partial(engine.offload_now, whole=True))
    return result


def _optimizer_of(result: Any, config: Any) -> Any:
    """Return what was built; an empty chain gets the config, by which `after_model_hooks` sees the flag."""
    optimizer = result[0] if isinstance(result, tuple) else result
    if getattr(optimizer, "chained_optimizers", None) == []:
        optimizer.config = config
    return optimizer


GROUPS = "opt_group_ranges"  # the parameter with mcore's param groups


def builds_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make masters without memory while `build_optimizer` builds an optimizer for the native engine."""
    if not is_upstreams(wrapped):  # other code in its place sees all parameters, once
        return wrapped(*args, **kwargs)
    bound = inspect.signature(wrapped).bind(*args, **kwargs)

    def build(groups: list[Any]) -> Any:
        bound.arguments[GROUPS] = groups
        return wrapped(*bound.args, **bound.kwargs)

    return build_groups(build, bound.arguments[GROUPS])


def builds_float16_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Do as `builds_masters` for a Float16OptimizerWithFloat16Params."""
    inner = inspect.signature(wrapped).bind(*args, **kwargs).arguments["optimizer"]
    with whole_masters_made_late(inner.param_groups if inner else []):  # a rank without parameters has none
        return wrapped(*args, **kwargs)


def after_model_hooks(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Attach unless `build_optimizer` has, so that host memory is pinned before the first collective of training."""
    result = wrapped(*args, **kwargs)
    arguments = arguments_of(wrapped, args, kwargs)
    optimizer = arguments.get("optimizer")
    if optimizer is not None and flag_is_set(getattr(optimizer, "config", None)):
        attach(optimizer, model_config_of(arguments), settings_of(optimizer.config), arguments.get("model"))
    return result


def compile_helpers(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Let Bridge go on if `make` fails, as in mcore's wheel without a Makefile, but the compiled helper exists."""
    try:
        return wrapped(*args, **kwargs)
    except (SystemExit, FileNotFoundError) as error:
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError:
            raise error from None
        logger.info("megatron.core.datasets.helpers_cpp is there already; going on without make")
        return None
