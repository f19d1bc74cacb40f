"""The model builder: a job's model without memory, once for each pipeline stage, in one process without a GPU.

    python -m bridge_fgo.tools.job.builder REQUEST

REQUEST is JSON: target (or null), gpus, offload (OffloadConfig's arguments), vocab_size, overrides, patches
(whether to try that all of this package's patches fit). The answer is one
JSON object on stdout; whatever Megatron prints goes to stderr. torch's fake process groups make a world of any
size, Transformer Engine is `te_shapes`, and Bridge's own `runtime_config_update` and model builder do the rest, so
that what comes out is what `pretrain()` makes of the same config.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from bridge_fgo.bridge.refusals import uses_fsdp
from bridge_fgo.tools.arms.process_setup import forget_attention_backend
from bridge_fgo.tools.job.fsdp_layout import held_in_fsdp
from bridge_fgo.tools.job.layout import held_in_ddp
from bridge_fgo.tools.job.parallel import parallel_of
from bridge_fgo.tools.standins import te_shapes
from bridge_fgo.tools.standins.cuda import without_gpu
from bridge_fgo.tools.standins.fsdp import fsdp_on_meta

FSDP_SETTINGS = (
    "ddp.use_megatron_fsdp=true checkpoint.ckpt_format=fsdp_dtensor "
    "ddp.data_parallel_sharding_strategy=optim_grads_params"
)
PLAIN = (str, int, float, bool, type(None))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of what is installed, and of the job; see `main`."""
    with contextlib.ExitStack() as stack:
        try:
            found = begin(stack, request)
        except Exception as error:  # a patch that does not fit, or whatever keeps Megatron from being imported
            traceback.print_exc()
            said = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
            return {"install_refuses": said}
        return found if request["target"] is None else found | examine(request)


def begin(stack: contextlib.ExitStack, request: dict[str, Any]) -> dict[str, Any]:
    """Install the package, with no GPU, until the stack is left; return what mcore is here.

    Raises:
        RuntimeError: a patch does not fit the Bridge that is here.
    """
    import bridge_fgo
    from bridge_fgo.bridge.compat import mcore_version, upstream_generation

    forget_attention_backend()  # a kernel changes no tensor of an estimate
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # deterministic configs ask for these two
    os.environ.setdefault("NCCL_ALGO", "Ring")
    installation = stack.enter_context(bridge_fgo.install(bridge_fgo.OffloadConfig(**request["offload"])))
    stack.enter_context(without_gpu())
    if request["patches"]:
        import_all(installation.modules)
    return {"mcore": mcore_version(), "offloader": upstream_generation()}


def examine(request: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of the job, or the "error" that a mistake in its config is."""
    from bridge_fgo.tools.job.recipes import load_config

    try:
        config, gpus = load_config(request["target"], request["overrides"])
        gpus_given = request["gpus"] or gpus
        gpus = parallel_of(config, gpus_given).gpus
    except ValueError as error:
        return {"error": str(error)}
    found: dict[str, Any] = {"gpus": gpus, "gpus_given": gpus_given is not None}
    bridge_refuses = prepare(config, gpus)
    if bridge_refuses is not None and uses_fsdp(config) and "fsdp_dtensor" in bridge_refuses:
        bridge_refuses += f" Set together {FSDP_SETTINGS}"
    found["bridge_refuses"] = bridge_refuses
    try:
        found |= offload_of(config, request["offload"])
    except ValueError as error:
        return {"error": str(error)}
    if bridge_refuses is None:
        try:
            set_vocabulary(config, request["vocab_size"])
        except ValueError as error:
            return {"error": str(error)}
        try:
            builder = StageBuilder(config, gpus)
            found["stages"] = [builder.build(stage) for stage in range(pipeline_size(config))]
        except Exception as error:  # of layers that have no shapes here; the whole of it goes to stderr
            traceback.print_exc()
            return {"error": f"the model could not be built without a GPU: {type(error).__name__}: {error}"}
        found |= {"held": builder.held, "not_held": builder.not_held}
        found["bridge_estimate"] = bridge_estimate(config)
    found["config"] = plain_config(config)  # last: the vocabulary is only now known
    return found


def import_all(modules: list[str]) -> None:
    """Import what the package patches, as training would; what this Bridge does not have has nothing to patch.

    Raises:
        RuntimeError: a patch does not fit the Bridge that is here.
    """
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)


@contextlib.contextmanager
def world(gpus: int, rank: int) -> Iterator[None]:
    """Context in which this process is one rank of a world whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(gpus), LOCAL_RANK="0"):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=gpus)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def pipeline_size(config: Any) -> int:
    """Return the number of pipeline stages."""
    return int(config.model.pipeline_model_parallel_size)


def prepare(config: Any, gpus: int) -> str | None:
    """Finish the config as `pretrain()` does; return why Bridge refuses it, or None.

    The last part of Bridge's validation is this package's check, whose refusals `offload_of` lists.
    """
    from megatron.bridge.training.config import runtime_config_update

    from bridge_fgo.bridge.before_training import refusals_left_to_caller

    with refusals_left_to_caller(), world(gpus, 0):
        try:
            runtime_config_update(config)
        except Exception as error:  # asserts, ValueErrors and whatever else a setting makes Bridge stumble over
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
    return None


def offload_of(config: Any, offload: dict[str, Any]) -> dict[str, Any]:
    """Return whether the config asks for the offload, its refusals with the flag set, the engine and the settings.

    Raises:
        ValueError: the config's settings are refused, or are others than those of `offload`.
    """
    from bridge_fgo import OffloadConfig
    from bridge_fgo.bridge.compat import as_if_set, choose_engine
    from bridge_fgo.bridge.refusals import all_refusals
    from bridge_fgo.bridge.settings import settings_of

    flag, optimizer = as_if_set(config.optimizer)
    settings = settings_of(optimizer, OffloadConfig(**offload))
    sections = {name: getattr(config, name) for name in ("ddp", "dist", "model", "checkpoint")}
    refusals = list(all_refusals(SimpleNamespace(optimizer=optimizer, **sections), settings))
    engine = None if refusals else choose_engine(settings, optimizer)
    return {"flag": flag, "refusals": refusals, "engine": engine, "settings": asdict(settings)}


class StageBuilder:
    """Builds a job's pipeline stages, each in a world of its own.

    Attributes:
        held: of each stage what its ranks hold (`bridge_fgo.tools.job.held.Held`), as JSON takes it.
        not_held: why that cannot be told, and `held` is empty; else "".
    """

    def __init__(self, config: Any, gpus: int) -> None:
        self._config, self._parallel = config, parallel_of(config, gpus)
        self.held: list[dict[str, Any]] = []
        self.not_held = ""
        self._known: dict[str, dict[str, Any]] = {}

    def build(self, stage: int) -> list[list[dict[str, Any]]]:
        """Return the tensors of each model chunk of a pipeline stage, in the model's order."""
        from megatron.bridge.models.model_provider import get_model
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.module import Float16Module

        config, model, gpus = self._config, self._config.model, self._parallel.gpus
        rank = stage * model.tensor_model_parallel_size * model.context_parallel_size
        if not config.dist.use_tp_pp_dp_mapping:
            rank = stage * self._parallel.stage_ranks
        with world(gpus, rank):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=model.tensor_model_parallel_size,
                pipeline_model_parallel_size=model.pipeline_model_parallel_size,
                virtual_pipeline_model_parallel_size=model.virtual_pipeline_model_parallel_size,
                context_parallel_size=model.context_parallel_size,
                expert_model_parallel_size=model.expert_model_parallel_size,
                num_distributed_optimizer_instances=self._parallel.optimizer_instances,
                expert_tensor_parallel_size=model.expert_tensor_parallel_size,
                order="tp-cp-ep-pp-dp" if config.dist.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
                create_gloo_process_groups=False,
            )
            try:
                assert parallel_state.get_pipeline_model_parallel_rank() == stage
                groups = ProcessGroupCollection.use_mpu_process_groups()
                model._pg_collection = groups
                for name in ("gradient_accumulation_fusion", "use_transformer_engine_op_fuser"):
                    setattr(model, name, False)  # they need CUDA extensions or fused operations; change no parameter
                chunks = get_model(
                    model,
                    config.ddp,
                    wrap_with_ddp=False,
                    mixed_precision_wrapper=Float16Module,
                    init_model_with_meta_device=True,
                    pg_collection=groups,
                )
                with_matrices = config.optimizer.optimizer != "adam"
                found = [
                    [tensor_of(name, param, with_matrices) for name, param in chunk.named_parameters()]
                    for chunk in chunks
                ]
                if not self.not_held:
                    self._lay_out(chunks, groups, key=json.dumps([stage == 0, found]))
                return found
            finally:
                parallel_state.destroy_model_parallel()

    def _lay_out(self, chunks: list[Any], groups: Any, key: str) -> None:
        """Note what the ranks of a stage hold; stages of the same `key` hold the same."""
        try:
            if key not in self._known:
                if uses_fsdp(self._config):
                    with fsdp_on_meta():
                        held = held_in_fsdp(self._config, chunks, groups, self._parallel)
                else:
                    held = held_in_ddp(self._config, chunks, groups, self._parallel)
                self._known[key] = asdict(held)
            self.held.append(self._known[key])
        except Exception as error:  # of optimizers and layouts that mcore cannot make, or not here
            traceback.print_exc()
            self.not_held = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self.held = []


def set_vocabulary(config: Any, vocab_size: int | None) -> None:
    """Give the model the vocabulary that Bridge takes from the tokenizer, which is not loaded here.

    Raises:
        ValueError: nobody says how large it is.
    """
    if config.model.vocab_size is not None:
        return
    size = getattr(config.tokenizer, "vocab_size", None) or vocab_size
    if size is None:
        raise ValueError("model.vocab_size and tokenizer.vocab_size are None, and no tokenizer is loaded: --vocab-size")
    config.model.vocab_size, config.model.should_pad_vocab = size, True


def tensor_of(name: str, param: torch.nn.Parameter, with_matrices: bool) -> dict[str, Any]:
    """Return what an estimate needs of a parameter; see `bridge_fgo.tools.job.job.Tensor`."""
    is_embedding = getattr(param, "is_embedding_or_output_parameter", False)
    matrix = {"matrix": param.dim() == 2 and not is_embedding} if with_matrices else {}
    return matrix | {
        "name": name,
        "numel": param.numel(),
        "dtype": str(param.dtype).removeprefix("torch."),
        "quantized": te_shapes.is_quantized(param),
        "expert": not getattr(param, "allreduce", True),
        "own_bucket": bool(getattr(param, "shared_embedding", False)),
        "trainable": param.requires_grad,
    }


def bridge_estimate(config: Any) -> dict[str, float] | None:
    """Return Bridge's own estimate in bytes of its most loaded rank; None where it has none for this model."""
    from megatron.bridge.training.utils.theoretical_memory_utils import estimate_training_memory

    microbatches = config.train.global_batch_size // (config.train.micro_batch_size * config.data_parallel_size)
    try:
        estimate = estimate_training_memory(config, num_microbatches=microbatches)
    except (AttributeError, TypeError, ValueError):  # of models that it does not know
        return None
    return {
        "weights_gradients_states": estimate.weight_and_optimizer_bytes,
        "total": estimate.total_memory_bytes,
        "parameters": estimate.total_parameters,
    }


def plain_config(config: Any) -> dict[str, dict[str, Any]]:
    """Return the settings of each section that JSON can carry."""
    from bridge_fgo.tools.job.saved_config import SECTIONS

    found = {
        section: {name: plain(value) for name, value in vars(getattr(config, section)).items() if is_plain(value)}
        for section in SECTIONS
    }
    if hasattr(config.optimizer, "provide"):  # a method, perhaps, that Bridge calls to build the optimizer
        found["optimizer"]["provide"] = plain(config.optimizer.provide)
    return found


def is_plain(value: Any) -> bool:
    """Return whether `plain` can carry a value."""
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return isinstance(value, (*PLAIN, torch.dtype, Enum)) or callable(value)


def plain(value: Any) -> Any:
    """Return a value as JSON takes it: dtypes as "torch.bfloat16", enum members and functions by name."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    return value if isinstance(value, PLAIN) else getattr(value, "__name__", type(value).__name__)


def main() -> None:
    """Answer the request of the command line."""
    out = os.dup(1)  # what Megatron and its libraries print must not mix with the answer
    os.dup2(2, 1)
    te_shapes.install()
    result = answer(json.loads(sys.argv[1]))
    with os.fdopen(out, "w", encoding="utf-8") as stdout:
        json.dump(result, stdout)


if __name__ == "__main__":
    main()
