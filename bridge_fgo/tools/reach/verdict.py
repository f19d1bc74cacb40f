"""What this package says of one of Bridge's configs with the flag set, where Bridge itself makes a job of it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

from bridge_fgo.bridge.compat import FLAG
from bridge_fgo.bridge.refusals import all_refusals
from bridge_fgo.config import OffloadConfig

VOCABULARY = 128
"""Tokens of the stand-in models; some recipes need the model to say how many."""

MODEL: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": VOCABULARY}
ARGUMENTS = {"megatron.bridge.diffusion.recipes.nemotron_labs_diffusion.ar_to_dlm": {"hf_path": "a stand-in"}}
"""What the config functions of a module are called with. These make no model unless they are told which."""

SETTING = re.compile(r"(?:^|[ (])(\w+\.\w+=(?:'[^']*'|[\w.]+))")


@dataclass(frozen=True)
class Verdict:
    """What came of one config function.

    outcome: "accepted" or "refused" by this package; "Bridge refuses": its validation raised; "not built": the function
        raised.
    reasons: the refusals, or the error; empty where it is accepted.
    """

    outcome: Literal["accepted", "refused", "Bridge refuses", "not built"]
    reasons: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """The class of the reasons: of each refusal the setting that it begins with, of an error its type."""
        if self.outcome in ("Bridge refuses", "not built"):
            return self.reasons[0].partition(":")[0]
        return ", ".join(dict.fromkeys(setting_of(refusal) for refusal in self.reasons))


def setting_of(refusal: str) -> str:
    """Return the first `section.setting=value` of a refusal, or all of it where it names none."""
    found = SETTING.search(refusal)
    return found[1] if found else refusal


def verdict_of(function: Callable[..., Any], settings: OffloadConfig | None = None) -> Verdict:
    """Build a config, set the flag, and ask this package's own refusals.

    Args:
        function: makes a ConfigContainer; to be called in `without_hugging_face`.
        settings: of the offload; the defaults when None.
    """
    with mock.patch.dict(os.environ):  # a recipe's variables are not the next one's
        return _verdict_of(function, settings or OffloadConfig())


def _verdict_of(function: Callable[..., Any], settings: OffloadConfig) -> Verdict:
    try:
        config = function(**ARGUMENTS.get(function.__module__, {}))
    except Exception as error:  # whatever a recipe raises is told by its name and never skipped
        return Verdict("not built", (_told(error),))
    try:
        prepare(config)
    except Exception as error:  # its asserts and ValueErrors, as in `bridge_fgo.tools.job.builder`
        return Verdict("Bridge refuses", (_told(error),))
    setattr(config.optimizer, FLAG, True)
    refusals = tuple(all_refusals(config, settings))
    return Verdict("refused", refusals) if refusals else Verdict("accepted")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


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
    from megatron.bridge.diffusion.models.nemotron_labs_diffusion import nemotron_labs_diffusion_provider
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
    from megatron.bridge.training import mixed_precision

    class StandInProvider(GPTModelProvider):
        def to_text_provider(self) -> StandInProvider:
            """Return itself: it has no vision tower to leave out."""
            return self

    def diffusion_provider(*args: object, **kwargs: object) -> Any:
        return nemotron_labs_diffusion_provider.NemotronLabsDiffusionModelProvider(**MODEL)

    def provider(*args: object, **kwargs: object) -> StandInProvider:
        return StandInProvider(**MODEL)

    def bridge(*args: object, **kwargs: object) -> SimpleNamespace:
        return SimpleNamespace(to_megatron_provider=provider)

    def hf_config(*args: object, **kwargs: object) -> SimpleNamespace:
        return SimpleNamespace(text_config=SimpleNamespace())

    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in (
            (AutoBridge, "from_hf_pretrained", bridge),
            (AutoBridge, "from_hf_config", bridge),
            (transformers.AutoConfig, "from_pretrained", hf_config),
            (transformers.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: range(VOCABULARY)),
            (FluxBridge, "provider_bridge", lambda *args, **kwargs: FluxProvider()),
            (nemotron_labs_diffusion_bridge.NemotronLabsDiffusionBridge, "provider_bridge", diffusion_provider),
            (PreTrainedCausalLM, "from_pretrained", hf_config),
            # Transformer Engine may not be here either, and FP4 asks how old it is.
            (mixed_precision, "is_te_min_version", lambda *args, **kwargs: True),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield
