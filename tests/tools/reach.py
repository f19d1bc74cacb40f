"""What this package says of every config that the installed Megatron-Bridge ships, on a machine without a GPU.

    python tests/tools/reach.py

Takes less than a minute, most of it to import Bridge. `reach.md` has the table, and what stands in.
"""

import contextlib
import importlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bridge_fgo.bridge.compat import FLAG
from bridge_fgo.bridge.refusals import all_refusals
from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.job import target
from bridge_fgo.tools.standins.cuda import without_gpu
from bridge_fgo.tools.standins.hollow import import_bridge

ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
VOCABULARY = 128
"""Tokens of the stand-in models; some recipes need the model to say how many."""

MODEL: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": VOCABULARY}
ARGUMENTS = {"megatron.bridge.diffusion.recipes.nemotron_labs_diffusion.ar_to_dlm": {"hf_path": "a stand-in"}}
"""What the config functions of a module are called with. These make no model unless they are told which."""

ORDER = ("accepted", "refused", "Bridge refuses", "not built")
"""Outcomes: the first two are this package's; Bridge's validation raised; the function raised."""


def config_functions() -> dict[str, Callable[..., Any]]:
    """Return the config functions of Bridge's sources, by module and name.

    A config function is public, is annotated to return a ConfigContainer, and can be called without arguments.

    Raises:
        ImportError: a module of Bridge's recipes cannot be imported, so that what it holds is not known.
    """
    found = {}
    for module in target._bound():
        for name, value in vars(importlib.import_module(module)).items():
            if not inspect.isfunction(value) or (value.__module__, value.__name__) != (module, name) or name[0] == "_":
                continue
            signature = inspect.signature(value)
            needed = [one for one in signature.parameters.values() if one.default is one.empty]
            returned = getattr(signature.return_annotation, "__name__", str(signature.return_annotation))
            if returned.strip("'") == "ConfigContainer" and all(one.kind in ANY_NUMBER for one in needed):
                found[f"{module}.{name}"] = value
    return found


def verdict_of(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Build a config, set the flag, and ask this package's own refusals; to be called in `without_hugging_face`.

    Returns an outcome of `ORDER`; the refusals, or the type of the error; and that error.
    """
    outcome = "not built"
    with mock.patch.dict(os.environ):  # a recipe's variables are not the next one's
        try:
            config = function(**ARGUMENTS.get(function.__module__, {}))
            outcome = "Bridge refuses"
            prepare(config)
        except Exception as error:  # whatever is raised is told by its name and never skipped
            return outcome, type(error).__name__, " ".join(str(error).split())
        setattr(config.optimizer, FLAG, True)
        refusals = "; ".join(all_refusals(config, OffloadConfig()))
    return "refused" if refusals else "accepted", refusals, ""


def prepare(config: Any) -> None:
    """Apply those parts of Bridge's `runtime_config_update` that change what this package's refusals read.

    That is the precision's settings, what Megatron-FSDP turns on, and that one section's DistributedOptimizer is the
    other's too. The rest depends on the model's real shapes and on the number of ranks, which are not here.
    """
    from megatron.bridge.training import config as bridge_config
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    bridge_config.apply_environment_variables(config)
    if config.mixed_precision is not None:
        if isinstance(config.mixed_precision, str):
            config.mixed_precision = get_mixed_precision_config(config.mixed_precision)
        config.mixed_precision.finalize()
        config.mixed_precision.setup(config.model, config.optimizer, config.ddp)
    if config.dist.use_megatron_fsdp or config.ddp.use_megatron_fsdp:
        config._validate_and_apply_megatron_fsdp_configs()
    bridge_config._validate_and_sync_distributed_optimizer_settings(config)


@contextlib.contextmanager
def without_hugging_face() -> Iterator[None]:
    """Context in which Bridge's recipes get a small stand-in for a model that they would look up on Hugging Face.

    What is refused depends on the settings that a recipe gives its model, not on the model's sizes.
    """
    import transformers
    from megatron.bridge.diffusion.conversion.flux.flux_bridge import FluxBridge
    from megatron.bridge.diffusion.conversion.nemotron_labs_diffusion import nemotron_labs_diffusion_bridge
    from megatron.bridge.diffusion.models.flux.flux_provider import FluxProvider
    from megatron.bridge.diffusion.models.nemotron_labs_diffusion import nemotron_labs_diffusion_provider as labs
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
    from megatron.bridge.training import mixed_precision

    class StandInProvider(GPTModelProvider):
        def to_text_provider(self) -> "StandInProvider":
            """Return itself: it has no vision tower to leave out."""
            return self

    def built_model(*args: Any, **kwargs: Any) -> Any:
        """Return the config of a model that a builder builds, as Bridge has them from 0.7 on."""
        from megatron.bridge.models.gpt.model_config import BridgeGPTModelConfig
        from megatron.bridge.models.transformer_config import TransformerConfig

        numbers = {name: value for name, value in MODEL.items() if name != "vocab_size"}
        return BridgeGPTModelConfig(transformer=TransformerConfig(**numbers), vocab_size=VOCABULARY)

    bridge = SimpleNamespace(
        to_megatron_provider=lambda *args, **kwargs: StandInProvider(**MODEL), get_model_config=built_model
    )
    hf_config = SimpleNamespace(text_config=SimpleNamespace())
    labs_bridge = nemotron_labs_diffusion_bridge.NemotronLabsDiffusionBridge

    def answering(make: Callable[[], Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: make()

    with contextlib.ExitStack() as stack:
        for owner, name, make in (
            (AutoBridge, "from_hf_pretrained", lambda: bridge),
            (AutoBridge, "from_hf_config", lambda: bridge),
            (transformers.AutoConfig, "from_pretrained", lambda: hf_config),
            (transformers.AutoTokenizer, "from_pretrained", lambda: range(VOCABULARY)),
            (FluxBridge, "provider_bridge", FluxProvider),
            (labs_bridge, "provider_bridge", lambda: labs.NemotronLabsDiffusionModelProvider(**MODEL)),
            (PreTrainedCausalLM, "from_pretrained", lambda: hf_config),
            # Transformer Engine may not be here either, and FP4 asks how old it is.
            (mixed_precision, "is_te_min_version", lambda: True),
        ):
            stack.enter_context(mock.patch.object(owner, name, answering(make)))
        yield


def table(verdicts: Mapping[str, tuple[str, str, str]]) -> str:
    """Return the table as text: a row for each outcome and reason, in the order of `ORDER` and the most first.

    Args:
        verdicts: of each config function, by module and name. Those that did not get as far as this package are named.
    """
    classes: dict[tuple[str, str], list[str]] = {}
    for name, (outcome, reason, why) in sorted(verdicts.items()):
        classes.setdefault((outcome, reason), []).append(f"{'':23}{name}  {why}".rstrip())
    built = sum(outcome != "not built" for outcome, *_ in verdicts.values())
    lines = [f"{len(verdicts)} config functions; {built} build", ""]
    for (outcome, reason), of in sorted(classes.items(), key=lambda row: (ORDER.index(row[0][0]), -len(row[1]))):
        lines.append(f"{len(of):5}  {outcome:14}  {reason}".rstrip())
        lines += of if outcome in ("Bridge refuses", "not built") else []
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):  # Bridge prints what it turns on
        import_bridge()
        functions = config_functions()
        # `plan` finds the same functions without an import.
        assert {name.rpartition(".")[2] for name in functions} <= target.config_functions().keys()
        with without_gpu(), without_hugging_face():
            verdicts = {name: verdict_of(function) for name, function in functions.items()}
    sys.stdout.write(table(verdicts))


if __name__ == "__main__":
    main()
