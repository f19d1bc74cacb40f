"""The model builder: a job's model without memory, once for each pipeline stage, in one process without a GPU.

    python -m bridge_fgo.tools.job.builder REQUEST

REQUEST is JSON: target (or null), gpus, offload (OffloadConfig's arguments), vocab_size, overrides, patches (whether to
try that all of this package's patches fit), whole (whether nothing is hollow; see `unused`). The answer is one JSON
object on stdout; whatever Megatron prints goes to stderr. With torch's fake process groups for a world of any size, and
`te_shapes` for Transformer Engine, Bridge's own `runtime_config_update` and model builder make what `pretrain()` makes
of the same config.
"""

import contextlib
import copy
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch

from bridge_fgo.bridge.compat import CHUNKED_FLAG, FLAG, TRANSFORMER, as_named_in
from bridge_fgo.bridge.refusals import uses_fsdp
from bridge_fgo.recipes.overrides import overridden
from bridge_fgo.recipes.process import forget_attention_backend
from bridge_fgo.tools.job.layout import held_by_ranks
from bridge_fgo.tools.job.parallel import Parallel, parallel_of
from bridge_fgo.tools.job.recipes import load_config
from bridge_fgo.tools.job.recomputation import TURNED_OFF, kinds, told
from bridge_fgo.tools.standins import te_shapes, unused
from bridge_fgo.tools.standins.cuda import without_gpu

FSDP_SETTINGS = (
    "ddp.use_megatron_fsdp=true checkpoint.ckpt_format=fsdp_dtensor "
    "ddp.data_parallel_sharding_strategy=optim_grads_params"
)
PLAIN = (str, int, float, bool, type(None))
SECTIONS = ("model", "optimizer", "train", "ddp", "dist", "checkpoint", "tokenizer", "mixed_precision", "comm_overlap")
"""The sections of the config that the answer has, of those that are set."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of what is installed, and of the job; the "error" that a mistake in its config is."""
    with contextlib.ExitStack() as stack:
        try:
            found = begin(stack, request)
        except Exception as error:  # a patch that does not fit, or whatever keeps Megatron from being imported
            traceback.print_exc()
            said = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
            return {"install_refuses": said}
        try:
            return found if request["target"] is None else found | examine(request)
        except ValueError as error:
            return found | {"error": str(error)}


def begin(stack: contextlib.ExitStack, request: dict[str, Any]) -> dict[str, Any]:
    """Install the package, without a GPU, until the stack is left; return what mcore is here; raise as `install`."""
    import bridge_fgo
    from bridge_fgo.bridge.compat import mcore_version, upstream_generation

    forget_attention_backend()  # a kernel changes no tensor of an estimate
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # deterministic configs ask for these two
    os.environ.setdefault("NCCL_ALGO", "Ring")
    installation = stack.enter_context(bridge_fgo.install(bridge_fgo.OffloadConfig(**request["offload"])))
    stack.enter_context(without_gpu())
    for module in installation.modules if request["patches"] else ():
        with contextlib.suppress(ModuleNotFoundError):  # what this Bridge does not have has nothing to patch
            importlib.import_module(module)
    return {"mcore": mcore_version(), "offloader": upstream_generation()}


def examine(request: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of the job; ValueError if there is none, or it cannot be built."""
    config, gpus = load_config(request["target"], request["overrides"])
    gpus_given = request["gpus"] or gpus
    gpus = parallel_of(config, gpus_given).gpus
    found: dict[str, Any] = {"gpus": gpus, "gpus_given": gpus_given is not None}
    peft, checkpoint = getattr(config, "peft", None), config.checkpoint
    if (peft or checkpoint.pretrained_checkpoint) and not request["patches"]:  # a plan needs no weights
        checkpoint.pretrained_checkpoint = os.devnull  # Bridge asserts that it is there
    as_given = copy.deepcopy(config)
    found["bridge_refuses"] = prepare(config, gpus)
    found |= offload_of(config, request["offload"])
    if found["bridge_refuses"] is None:
        set_vocabulary(config, request["vocab_size"])
        try:
            found |= build_stages(config, gpus)
        except Exception as error:  # of layers that have no shapes here; the whole of it goes to stderr
            traceback.print_exc()
            unset = [name for name, value in vars(config.model).items() if name.endswith("_spec") and value is None]
            if unset and "None" in str(error) and "callable" in str(error):
                raise ValueError(
                    f"model.{unset[0]}=None: Bridge calls it for the model's layers: name a function, or leave the "
                    "line out of the config, for Bridge's own"
                ) from None
            raise ValueError(f"the model could not be built without a GPU: {type(error).__name__}: {error}") from None
        found["recomputations"] = dict(recomputations(as_given, gpus))
    sections = {name: getattr(config, name, None) for name in SECTIONS}
    found["config"] = {name: plain_section(each) for name, each in sections.items() if hasattr(each, "__dict__")}
    if peft:
        found["config"]["peft"] = {"kind": type(peft).__name__}
    if hasattr(config.optimizer, "provide"):  # a method, perhaps, that Bridge calls to build the optimizer
        found["config"]["optimizer"]["provide"] = plain(config.optimizer.provide)
    return found


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


def prepare(config: Any, gpus: int) -> str | None:
    """Finish the config as `pretrain()` does; return why Bridge refuses it, or None.

    The last part of Bridge's validation is this package's check, whose refusals `offload_of` lists.
    """
    from megatron.bridge.training.config import runtime_config_update

    from bridge_fgo.bridge.settings import caller
    from bridge_fgo.states.shadowed import shadowed

    with shadowed(caller, {"refuses": True}), world(gpus, 0):
        try:
            runtime_config_update(config)
            return None
        except Exception as error:  # asserts, ValueErrors and whatever else a setting makes Bridge stumble over
            traceback.print_exc()
            together, said = uses_fsdp(config) and "fsdp_dtensor" in str(error), " ".join(str(error).split())
            return f"{type(error).__name__}: {said}{f' Set together {FSDP_SETTINGS}' if together else ''}"


def recomputations(config: Any, gpus: int) -> Iterator[tuple[str, list[str] | str]]:
    """Yield the kinds of recomputation and offload that Bridge does not take as they are.

    Each with what to turn off, or why it is refused. Beside activation offload Bridge asks for a variable.
    """

    def refusal(overrides: tuple[str, ...]) -> str:
        try:
            with mock.patch.dict(os.environ, NVTE_CPU_OFFLOAD_V1="1"):
                return " ".join((prepare(overridden(copy.deepcopy(config), overrides), gpus) or "").split())
        except ValueError as error:  # there is nothing of that name to turn off
            return str(error)

    for name, changes in kinds(config.model).items():
        kind = told(config.model, changes)
        choices = (tuple(as_named_in(config.model, override) for override in off) for off in TURNED_OFF)
        taken = next((off for off in choices if not refusal(kind + off)), None)
        if taken != ():
            yield name, refusal(kind) if taken is None else [*taken]


def as_if_set(optimizer_config: Any) -> tuple[bool, Any]:
    """Return whether an OptimizerConfig has anything in a flag but False, and one like it whose flag is set."""
    asked = any(getattr(optimizer_config, name, False) is not False for name in (FLAG, CHUNKED_FLAG))
    result = copy.copy(optimizer_config)
    if not asked:
        setattr(result, FLAG, True)
    return asked, result


def offload_of(config: Any, offload: dict[str, Any]) -> dict[str, Any]:
    """Return whether the config asks for the offload, its refusals with the flag set, the engine and the settings.

    ValueError if the config's settings are refused, or are others than those of `offload`.
    """
    from bridge_fgo import OffloadConfig
    from bridge_fgo.bridge.compat import choose_engine
    from bridge_fgo.bridge.refusals import all_refusals
    from bridge_fgo.bridge.settings import settings_of

    flag, optimizer = as_if_set(config.optimizer)
    settings = settings_of(optimizer, OffloadConfig(**offload))
    sections = {name: getattr(config, name, None) for name in SECTIONS if name != "optimizer"}
    refusals = list(all_refusals(SimpleNamespace(optimizer=optimizer, **sections), settings))
    engine = None if refusals else choose_engine(settings, optimizer)
    return {"flag": flag, "refusals": refusals, "engine": engine, "settings": asdict(settings)}


def build_stages(config: Any, gpus: int) -> dict[str, Any]:
    """Return of each pipeline stage its tensors and what its ranks hold, or `not_held`: why that cannot be told."""
    parallel = parallel_of(config, gpus)
    stages: list[list[list[dict[str, Any]]]] = []
    held: list[dict[str, Any]] = []
    known: dict[str, dict[str, Any]] = {}  # stages of the same tensors hold the same, but the first
    not_held = ""
    for stage in range(parallel.pipeline):
        with model_of_stage(config, parallel, stage) as (chunks, groups):
            stages.append([[tensor_of(config, *named) for named in chunk.named_parameters()] for chunk in chunks])
            if not_held:
                continue
            key = json.dumps([stage == 0, stages[-1]])
            try:
                if key not in known:
                    known[key] = asdict(held_by_ranks(config, chunks, groups, parallel))
                held.append(known[key])
            except Exception as error:  # of optimizers and layouts that mcore cannot make, or not here
                traceback.print_exc()
                not_held = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                held = []
    return {"stages": stages, "held": held, "not_held": not_held}


@contextlib.contextmanager
def model_of_stage(config: Any, parallel: Parallel, stage: int) -> Iterator[tuple[list[Any], Any]]:
    """Context with the model chunks of a pipeline stage, and the process groups of its first rank."""
    from megatron.bridge.models.model_provider import get_model
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module

    model, stages_are_inner = config.model, config.dist.use_tp_pp_dp_mapping
    with world(
        parallel.gpus, stage * (parallel.tensor * parallel.context if stages_are_inner else parallel.stage_ranks)
    ):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=model.tensor_model_parallel_size,
            pipeline_model_parallel_size=model.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=model.virtual_pipeline_model_parallel_size,
            context_parallel_size=model.context_parallel_size,
            expert_model_parallel_size=model.expert_model_parallel_size,
            num_distributed_optimizer_instances=parallel.optimizer_instances,
            expert_tensor_parallel_size=model.expert_tensor_parallel_size,
            order="tp-cp-ep-pp-dp" if stages_are_inner else "tp-cp-ep-dp-pp",
            create_gloo_process_groups=False,
        )
        try:
            assert parallel_state.get_pipeline_model_parallel_rank() == stage
            groups = model._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
            numbers, build = getattr(model, TRANSFORMER, model), {}
            for name in ("gradient_accumulation_fusion", "use_transformer_engine_op_fuser"):
                setattr(numbers, name, False)  # they need CUDA extensions or fused operations; change no parameter
            if numbers is not model:  # `get_model` knows providers, which build themselves
                build["provide"] = partial(model.get_builder_cls()(model).build_model, groups)
            # Nor does this, which needs Transformer Engine. What activations the job has depends on it.
            with (
                mock.patch.object(numbers, "cpu_offloading", False),
                mock.patch.dict(vars(model) if build else {}, build),
            ):
                chunks = get_model(
                    model,
                    config.ddp,
                    wrap_with_ddp=False,
                    mixed_precision_wrapper=Float16Module,
                    init_model_with_meta_device=True,
                    pre_wrap_hook=partial(with_adapters, config.peft) if getattr(config, "peft", None) else None,
                    pg_collection=groups,
                )
            yield chunks, groups
        finally:
            parallel_state.destroy_model_parallel()


def with_adapters(peft: Any, chunks: list[Any]) -> list[Any]:
    """Return model chunks with frozen parameters and adapters without memory, as Bridge's own hook makes them."""
    from megatron.bridge.peft import utils

    with (
        torch.device("meta"),
        mock.patch.object(utils, "version", lambda package: te_shapes.ShapesModule.__version__),
        # It sends values, and there are none.
        mock.patch.object(
            utils.ParallelLinearAdapter, "_synchronize_shared_expert_parameters", lambda self: None, create=True
        ),
    ):
        return peft(chunks, training=True)


def set_vocabulary(config: Any, vocab_size: int | None) -> None:
    """Give the model the tokenizer's vocabulary, which is not loaded here; ValueError if nobody says its size."""
    if config.model.vocab_size is not None:
        return
    size = getattr(config.tokenizer, "vocab_size", None) or vocab_size
    if size is None:
        raise ValueError("model.vocab_size and tokenizer.vocab_size are None, and no tokenizer is loaded: --vocab-size")
    config.model.vocab_size, config.model.should_pad_vocab = size, True


def tensor_of(config: Any, name: str, param: torch.nn.Parameter) -> dict[str, Any]:
    """Return what an estimate needs of a parameter; see `bridge_fgo.tools.job.held.Tensor`."""
    return {
        "name": name,
        "numel": param.numel(),
        "dtype": str(param.dtype).removeprefix("torch."),
        "quantized": te_shapes.is_quantized(param),
        "expert": not getattr(param, "allreduce", True),
        "own_bucket": bool(getattr(param, "shared_embedding", False)),
        "trainable": param.requires_grad,
    }


def plain_section(section: Any) -> dict[str, Any]:
    """Return the settings of a section that JSON can carry, and those of a section within it."""
    found = {}
    for name, value in vars(section).items():
        with contextlib.suppress(TypeError):
            found[name] = plain_section(value) if name == TRANSFORMER else plain(value)
    return found


def plain(value: Any) -> Any:
    """Return a value as JSON takes it: dtypes as "torch.bfloat16", enum members and functions by name; or TypeError."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, PLAIN):
        return value
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    raise TypeError(type(value))


def start_over(request: dict[str, Any], out: int) -> NoReturn:
    """Answer in a new process, with all packages as they are; `out` is the file that the answer is for."""
    os.dup2(out, 1)
    os.execv(sys.executable, [sys.executable, "-m", __spec__.name, json.dumps(request | {"whole": True})])


def main() -> None:
    """Answer the request of the command line."""
    out = os.dup(1)  # what Megatron and its libraries print must not mix with the answer
    os.dup2(2, 1)
    request = json.loads(sys.argv[1])
    if not request.get("whole"):
        unused.install(partial(start_over, request, out))
    te_shapes.install()
    result = answer(request)
    with os.fdopen(out, "w", encoding="utf-8") as stdout:
        json.dump(result, stdout)
    sys.stderr.flush()
    os._exit(0)  # to take down what was imported takes Python two seconds


if __name__ == "__main__":
    main()
