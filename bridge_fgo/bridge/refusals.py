"""Refuse configs before training, by tables: each row has the settings, the condition and the text of one refusal.

Every text begins with the settings and their values, and ends with what to do. Rows read attributes only, of Bridge's
configs or of a saved run config's plain namespaces. `bridge-fgo doctor` lists all refusals, training raises the first.
`compat.choose_engine` refuses settings that no engine honours, and `optimizers.eligible` built optimizers.
"""

import difflib
import os
import re
import resource
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from bridge_fgo.bridge.compat import FLAG, Choice, as_named_in, check_flag, choose_engine, flag_is_set, setting_of
from bridge_fgo.config import OffloadConfig
from bridge_fgo.memory.host_buffer import OTHER_FILES, hands_out_descriptors
from bridge_fgo.memory.host_memory import ranks_of_this_node
from bridge_fgo.states.distributed import MOMENTS

FLAG_TEXT = "optimizer.offload_optimizer_states=True"
FSDP = "ddp.use_megatron_fsdp=True"
MUONS = ("muon", "dist_muon", "adaptive_muon", "dist_adaptive_muon")  # mcore's names of Muon
_NAME = re.compile(r"\w+\.\w+")


def is_layer_wise(optimizer: Any) -> bool:
    """Return whether, by its OptimizerConfig, a Muon runs over mcore's LayerWiseDistributedOptimizer."""
    name = setting_of(optimizer, "optimizer")
    return name in MUONS and (
        name.startswith("dist_") or setting_of(optimizer, "use_layer_wise_distributed_optimizer") is True
    )


@dataclass(frozen=True)
class RunConfig:
    """The config of a run: a Bridge ConfigContainer, or some of its sections; settings and engine, if known."""

    cfg: Any
    settings: OffloadConfig | None = None
    engine: Choice | None = None

    def __getitem__(self, setting: str) -> Any:
        """Return the value of a setting, "section.name" or "OffloadConfig.name"; None if there is none."""
        section, _, name = setting.partition(".")
        return setting_of(self.settings if section == "OffloadConfig" else getattr(self.cfg, section, None), name)

    def sets(self, *settings: str) -> bool:
        """Return whether each of these settings is True; a mock's attribute is not."""
        return all(self[setting] is True for setting in settings)

    @property
    def is_fp32(self) -> bool:
        """Whether the weights are fp32; a recipe that Bridge has not validated says so by `mixed_precision` alone."""
        is_half = self["model.bf16"] is not False or self["model.fp16"] is not False
        return not is_half and getattr(self.cfg, "mixed_precision", None) is None

    @property
    def is_layer_wise(self) -> bool:
        """Whether a Muon runs over mcore's LayerWiseDistributedOptimizer."""
        return is_layer_wise(getattr(self.cfg, "optimizer", None))

    @property
    def saves(self) -> bool:
        """Whether checkpoints are saved."""
        return self["checkpoint.save"] is not None

    @property
    def saves_states(self) -> bool:
        """Whether checkpoints are saved with the optimizer's states."""
        return self.saves and bool(self["checkpoint.save_optim"])


@dataclass(frozen=True)
class Refusal:
    """One row of a table. A setting's name with a value stands as it is."""

    setting: str
    beside: tuple[str, ...]  # the settings that it cannot be combined with
    text: str | Callable[[RunConfig], str]  # why not, and what to do
    when: Callable[[RunConfig], bool] | None = None  # whether it is refused; by default if `setting` is True

    def applies(self, run: RunConfig) -> bool:
        """Return whether a run that asks for this is refused."""
        return run.sets(self.setting) if self.when is None else self.when(run)

    def text_for(self, run: RunConfig) -> str:
        """Return the text, which begins with the settings and their values."""
        names = self.setting, *self.beside
        first, *beside = (f"{name}={run[name]!r}" if _NAME.fullmatch(name) else name for name in names)
        with_ = " and ".join(filter(None, (", ".join(beside[:-1]), beside[-1])))
        text = as_set_in(run.cfg, self.text if isinstance(self.text, str) else self.text(run))
        return as_named_in(getattr(run.cfg, "model", None), f"{first} with {with_}: {text}")


def as_set_in(cfg: Any, advice: str) -> str:
    """Return advice that names each setting in the section of a Bridge config that decides it.

    Bridge copies what `mixed_precision` and `comm_overlap` say, and their defaults, over the settings of the same names
    in other sections. With one data-parallel rank, say, `ddp.overlap_grad_reduce=True` becomes False.
    """
    sources = {"mixed_precision": ("model", "optimizer", "ddp"), "comm_overlap": ("model",)}
    if setting_of(getattr(cfg, "ddp", None), "use_distributed_optimizer"):
        sources["comm_overlap"] += ("optimizer", "ddp")

    def placed(setting: re.Match[str]) -> str:
        section, name, value = setting.groups()
        for source, copied_to in sources.items():
            if section in copied_to and hasattr(getattr(cfg, source, None), name):
                return f"{source}.{name}={value} (which Megatron-Bridge copies to {section})"
        return setting[0]

    return re.sub(r"\b(\w+)\.(\w+)=([\w.']+)", placed, advice)


def texts(rows: Iterable[Refusal], run: RunConfig) -> Iterator[str]:
    """Yield the texts of the rows that refuse what is asked for."""
    return (row.text_for(run) for row in rows if row.applies(run))


def refuse(refusals: Iterator[str]) -> None:
    """Raise ValueError with the first of some texts."""
    for refusal in refusals:
        raise ValueError(refusal)


def uses_fsdp(cfg: Any) -> bool:
    """Return whether a Bridge config asks for Megatron-FSDP, in either of the sections by which Bridge knows."""
    return any(getattr(getattr(cfg, name, None), "use_megatron_fsdp", False) is True for name in ("ddp", "dist"))


def _instead_of_hybrid(run: RunConfig) -> str:
    """Return why HybridDeviceOptimizer is refused, and which setting offloads the share that it was given.

    Both take whole parameters in the optimizer's order until their share is reached, one of elements, one of bytes.
    """
    fraction = run["optimizer.optimizer_offload_fraction"]
    share = f"optimizer.optimizer_offload_fraction={fraction!r}"
    if not isinstance(fraction, int | float) or fraction >= 1:
        instead = "optimizer.optimizer_cpu_offload=False: the flag alone offloads every state"
    elif fraction > 0:
        instead = f"optimizer.optimizer_cpu_offload=False and OffloadConfig(fraction={fraction!r}) in place of {share}"
    else:
        instead = f"optimizer.optimizer_cpu_offload=False: {share} moves nothing, and the flag alone every state"
    if uses_fsdp(run.cfg):
        return (
            f"HybridDeviceOptimizer updates copies on the CPU, and with {FSDP} masters stay on the GPU beside them; "
            f"set {instead}; the masters are offloaded too, and parameter groups as a whole (with "
            "OffloadConfig.master_weights=False moments alone, which is what HybridDeviceOptimizer frees here)"
        )
    return f"HybridDeviceOptimizer keeps and updates states on the CPU; set {instead}; or leave the flag unset"


def _is_fp8(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and not (dtype.is_floating_point and dtype.itemsize >= 2)


HYBRID = Refusal("optimizer.optimizer_cpu_offload", (FLAG_TEXT,), _instead_of_hybrid)
STEP_IN_GRAPH = Refusal(
    "optimizer.optimizer_cuda_graph", (FLAG_TEXT,),
    "the graph has the states' addresses baked in; set optimizer.optimizer_cuda_graph=False or leave the flag unset",
)  # fmt: skip
FP8_MOMENTS = [
    Refusal(name, (FLAG_TEXT,),
            f"FP8 moments have scales of their own and cannot be offloaded; set {name}=torch.bfloat16 or leave the "
            "flag unset", lambda a, name=name: _is_fp8(a[name]))
    for name in (f"optimizer.{moment}_dtype" for moment in MOMENTS)
]  # fmt: skip
OF_OPTIMIZERS = [
    Refusal("optimizer.optimizer", (FLAG_TEXT,),
        "only the states of Adam and Muon can be offloaded; set optimizer.optimizer='adam' (or one of "
        f"{', '.join(MUONS)}) or leave the flag unset",
        lambda a: a["optimizer.optimizer"] not in ("adam", *MUONS)),
    Refusal("optimizer.muon_scalar_optimizer", ("optimizer.optimizer", FLAG_TEXT),
        "only the states of Adam and Muon can be offloaded; set optimizer.muon_scalar_optimizer='adam' or leave the "
        "flag unset",
        lambda a: a["optimizer.optimizer"] in MUONS and a["optimizer.muon_scalar_optimizer"] not in ("adam", None)),
    Refusal("optimizer.use_distributed_optimizer", ("optimizer.optimizer", FLAG_TEXT),
        "mcore then asks for DDP buffers laid out by layers, which Bridge does not make, so that no optimizer can be "
        "built, with the flag or without; set optimizer.use_distributed_optimizer=False and "
        "ddp.use_distributed_optimizer=False",
        lambda a: a.sets("optimizer.use_distributed_optimizer") and a.is_layer_wise),
    HYBRID,
    STEP_IN_GRAPH,
    *FP8_MOMENTS,
]  # fmt: skip
"""Rows that read the optimizer's section alone."""

GTP = [
    Refusal(name, (FLAG_TEXT,),
        "Generalized Tensor Parallelism spreads each weight over further ranks, which was neither run nor planned with "
        f"the offload; set {name}=1 and model.{kind}tensor_parallel_num_weight_shards=None, or leave the flag unset",
        lambda a, name=name: isinstance(a[name], int) and a[name] > 1)
    for kind in ("", "expert_") for name in (f"model.{kind}gtp_weight_remat_size",)
]  # fmt: skip
OF_CONFIGS = [
    Refusal("dist.use_torch_fsdp2", (FLAG_TEXT,),
        "torch FSDP2 shards the optimizer state itself; set dist.use_torch_fsdp2=False or leave the flag unset"),
    Refusal("optimizer.use_distributed_optimizer", (FLAG_TEXT, "model.bf16", "model.fp16"),
        "mcore's FP32Optimizer cannot be offloaded; set optimizer.use_distributed_optimizer=True and "
        "ddp.use_distributed_optimizer=True, or train in bf16",
        lambda a: a.is_fp32 and not a["optimizer.use_distributed_optimizer"] and not uses_fsdp(a.cfg)),
    *GTP,
]  # fmt: skip
"""Rows that read all sections and apply to every engine."""

UNDER_FSDP = [
    Refusal("ddp.megatron_fsdp_version", (FLAG_TEXT, FSDP),
        "only the states of the first can be offloaded; set ddp.megatron_fsdp_version=1 or leave the flag unset",
        lambda a: a["ddp.megatron_fsdp_version"] not in (1, None)),
    Refusal("checkpoint.async_save", (FLAG_TEXT, FSDP),
        "the background writer of fsdp_dtensor checkpoints would read states while the next step moves them; set "
        "checkpoint.async_save=False",
        lambda a: a.saves and a.sets("checkpoint.async_save")),
    Refusal("checkpoint.non_persistent_ckpt_type", (FLAG_TEXT, FSDP),
        "local checkpoints take states as they are, also those that are offloaded; set "
        "checkpoint.non_persistent_ckpt_type='global' or None",
        lambda a: a.saves and a["checkpoint.non_persistent_ckpt_type"] == "local"),
]  # fmt: skip

# mcore calls `finalize_model_grads_func` inside the schedule, and so inside of the graph.
GRAPH_OF_ITERATION = Refusal(
    "model.cuda_graph_impl", (FLAG_TEXT, "mcore's offloader"),
    "a full-iteration CUDA graph would capture the reload, which would never run again; use "
    "OffloadConfig(engine='native'), set model.cuda_graph_impl='none' or capture per-layer modules, or leave the flag "
    "unset",
    lambda a: a.engine != "native" and captures_full_iteration(a.cfg.model),
)  # fmt: skip
OF_ENGINES = [
    GRAPH_OF_ITERATION,
    # Its states are host tensors. Megatron-LM's own loop has the same check (its `save_checkpoint`).
    Refusal("checkpoint.ckpt_format", (FLAG_TEXT, "mcore's chunked offloader"),
        "set checkpoint.ckpt_format='torch_dist', or use OffloadConfig(engine='native')",
        lambda a: (
            a.engine == "mcore generation 2" and a.saves_states and a["checkpoint.ckpt_format"] != "torch_dist"
        )),
    # The writer gets the tensors as CUDA IPC handles, or as host memory by reference, and reads them while the next
    # step releases, reloads and overwrites that memory (NeMo-RL #3312, MLM #6544). The native engine hands out
    # copies; see `bridge_fgo.offload.snapshot`.
    Refusal("checkpoint.async_save", (FLAG_TEXT, "OffloadConfig.engine='mcore'"),
        "the background writer could read memory that mcore's offloader has given away; use "
        "OffloadConfig(engine='native'), or set checkpoint.async_save=False or checkpoint.save_optim=False",
        lambda a: a.engine != "native" and a.saves_states and bool(a["checkpoint.async_save"])),
]  # fmt: skip
"""Rows that apply to mcore's own offloaders."""

GRADIENTS = "OffloadConfig.gradients"


def _gradients(beside: str, text: str, when: Callable[[RunConfig], bool]) -> Refusal:
    """Return the row of a setting beside which gradients can be neither allocated late nor offloaded."""
    return Refusal(GRADIENTS, (beside,), f"{text}; or set {GRADIENTS}=False", lambda a: bool(a[GRADIENTS]) and when(a))


SURVIVE = "OffloadConfig.survive_crash"


def _survival(beside: str, text: str, when: Callable[[RunConfig], bool] | None = None) -> Refusal:
    """Return the row of a setting with which a step's weights cannot be made of what the host has."""
    asks = when or (lambda a: a.sets(beside))
    return Refusal(SURVIVE, (beside,), f"{text}; or set {SURVIVE}=False", lambda a: a.sets(SURVIVE) and asks(a))


FOLDER = "OffloadConfig.nvme_folder"
REMAINDERS = "OffloadConfig.master_remainders"
PRECISION_AWARE = "optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8"
OF_SETTINGS = [
    Refusal("OffloadConfig.moments", ("model.bf16", "model.fp16"),
        "fp32 weights have no masters, so that nothing would be offloaded; set moments=True or leave the flag unset",
        lambda a: a["OffloadConfig.moments"] is False and a.is_fp32),
    Refusal("ddp.overlap_param_gather", (FLAG_TEXT, "optimizer.optimizer", "MXFP8 weights (model.fp8_recipe='mxfp8')"),
        "mcore gathers these from the masters in forward, where they are offloaded; set "
        "ddp.overlap_param_gather=False, or OffloadConfig(master_weights=False), which offloads the moments alone",
        lambda a: (
            a.sets("OffloadConfig.master_weights", "ddp.overlap_param_gather")
            and a.is_layer_wise
            and a["model.fp8_recipe"] == "mxfp8"
            and (a.sets("ddp.fp8_param_gather") or a.sets("model.fp8_param"))
        )),
    Refusal(REMAINDERS, ("model.bf16", "model.fp16"),
        "only masters of bf16 weights can be copied in part; leave it at False",
        lambda a: a.sets(REMAINDERS) and (a.is_fp32 or a.sets("model.fp16"))),
    Refusal(REMAINDERS, ("optimizer.use_precision_aware_optimizer=True",),
        "Transformer Engine's FusedAdam keeps the masters, which mcore does not round; leave it at False",
        lambda a: a.sets(REMAINDERS, PRECISION_AWARE)),
    *(
        Refusal(REMAINDERS, (name,), "quantized weights are no roundings of their masters; leave it at False",
            lambda a, name=name: a.sets(REMAINDERS, name))
        for name in ("optimizer.reuse_grad_buf_for_mxfp8_param_ag", "ddp.fp8_param_gather", "ddp.fp4_param_gather")
    ),
    *(
        _survival(name, f"quantized weights were not yet made again of their masters; set {name}=False")
        for name in ("optimizer.reuse_grad_buf_for_mxfp8_param_ag", "ddp.fp8_param_gather", "ddp.fp4_param_gather")
    ),
    _survival("model.qk_clip", "clipped weights are no roundings of their masters; set model.qk_clip=False"),
    _survival("model.fp8_recipe", "to copy its scales in each step would wait for the GPU; use 'tensorwise', "
        "'blockwise' or 'mxfp8'",
        lambda a: bool(a["model.fp8"]) and a["model.fp8_recipe"] == "delayed"),
    _survival("optimizer.use_precision_aware_optimizer=True", "Transformer Engine's FusedAdam keeps the masters, which "
        "mcore does not round; set it to False",
        lambda a: a.sets(PRECISION_AWARE)),
    _survival("model.bf16=False", "fp32 weights have no masters; train in bf16", lambda a: a.is_fp32),
    _survival("optimizer.optimizer", "its all-gather of weights was not yet run after a start; use 'adam' or 'muon'",
        lambda a: a.is_layer_wise),
    _survival("model.cuda_graph_impl", "a graph of the whole iteration draws its random numbers itself; capture layers",
        lambda a: captures_full_iteration(getattr(a.cfg, "model", None))),
    Refusal(FOLDER, ("model.cuda_graph_impl",),
        "threads look whether copies are over, which a capture forbids; capture layers, or set nvme_folder=None",
        lambda a: a[FOLDER] is not None and captures_full_iteration(getattr(a.cfg, "model", None))),
    _gradients("ddp.overlap_grad_reduce",
        "all gradients of a rank are one bucket then, which the whole backward needs; set ddp.overlap_grad_reduce=True",
        lambda a: a["ddp.overlap_grad_reduce"] is False),
    _gradients("ddp.nccl_ub", "NCCL has the memory of the gradients registered; set ddp.nccl_ub=False",
        lambda a: a.sets("ddp.nccl_ub")),
    _gradients("optimizer.reuse_grad_buf_for_mxfp8_param_ag",
        "gradients share a buffer with the weights that are gathered; set ddp.fp8_param_gather=False and "
        "optimizer.reuse_grad_buf_for_mxfp8_param_ag=False: weights are kept in 16 bits then, and multiplied in MXFP8 "
        "as before",
        lambda a: a.sets("optimizer.reuse_grad_buf_for_mxfp8_param_ag")),
    *(
        _gradients(name, "Transformer Engine keeps the weights of all experts in one GroupedTensor, whose gradient is "
            f"not known to work; set {name}=False", lambda a, name=name: a.sets(name))
        for name in ("model.moe_single_grouped_weight", "model.moe_single_grouped_bias")
    ),
    *(
        _gradients(name, f"a CUDA graph has the addresses of the gradients baked in; set {name}='none'",
            lambda a, name=name: isinstance(a[name], str) and a[name] != "none")
        for name in ("model.cuda_graph_impl", "model.vision_cuda_graph_impl")
    ),
    _gradients("optimizer.optimizer", "its all-gather of weights takes the memory of the gradients; use 'muon' without "
        "optimizer.use_layer_wise_distributed_optimizer",
        lambda a: a.is_layer_wise),
    *(
        _gradients(name, f"kernels add to gradients later than, or beside, a layer's backward; set {name}=False, or "
            f"{GRADIENTS}='lazy'", lambda a, name=name: a.sets(GRADIENTS, name))
        for name in (
            "model.delay_wgrad_compute", "model.overlap_moe_expert_parallel_comm", "model.moe_shared_expert_overlap",
            "model.overlap_dispatch_backward_with_experts_wgrad",
        )
    ),
]  # fmt: skip
"""Settings that cannot be honoured: of masters, if there are none, or no weight is the rounding of one; and of
gradients whose memory other code relies on."""

OF_SETTINGS_UNDER_FSDP = [
    Refusal("OffloadConfig.engine", (FLAG_TEXT, FSDP),
        "mcore's offloader knows the buffers of its own DDP alone; use OffloadConfig(engine='native')",
        lambda a: a["OffloadConfig.engine"] == "mcore"),
    Refusal(REMAINDERS, (FLAG_TEXT, FSDP), "its masters are copied whole; leave it at False"),
    _gradients(FSDP, "it has buffers of its own for gradients", lambda a: True),
    Refusal(FOLDER, (FSDP,), "it was not yet run with states in files; set nvme_folder=None",
        lambda a: a[FOLDER] is not None),
    _survival(FSDP, "its masters were not yet gone on from; set ddp.use_megatron_fsdp=False", lambda a: True),
    Refusal("OffloadConfig.moments", ("ddp.megatron_fsdp_main_params_dtype",),
        "weights have no masters, and nothing would be offloaded; set moments=True or leave the flag unset",
        lambda a: (
            a["OffloadConfig.moments"] is False
            and getattr(a.cfg.ddp, "megatron_fsdp_main_params_dtype", "") is None
        )),
]  # fmt: skip


def refuse_config(cfg: Any, settings: OffloadConfig) -> None:
    """Raise ValueError if a config that Bridge has validated cannot be combined with these settings."""
    refuse(all_refusals(cfg, settings))


def config_refusals(cfg: Any) -> Iterator[str]:
    """Yield why a config whose flag may be set is refused, whatever engine serves it."""
    yield from misspelt_flags(cfg)
    try:
        check_flag(cfg.optimizer)
    except ValueError as error:
        yield str(error)
        return
    if flag_is_set(cfg.optimizer):
        yield from texts([*OF_OPTIMIZERS, *OF_CONFIGS, *(UNDER_FSDP if uses_fsdp(cfg) else ())], RunConfig(cfg))


def misspelt_flags(cfg: Any) -> Iterator[str]:
    """Yield each attribute that is almost the flag, or is the flag of another section: nothing would read it.

    Not meant are attributes that a class declares, sections of the user's own, and names that speak of loads.
    """
    declared = getattr(cfg, "__dataclass_fields__", vars(cfg))
    for section, owner in {"": cfg, **{name: value for name, value in vars(cfg).items() if name in declared}}.items():
        known = {*dir(type(owner)), *getattr(owner, "__dataclass_fields__", ())}
        given = {name for name, value in getattr(owner, "__dict__", {}).items() if value is True} - known
        for name in difflib.get_close_matches(FLAG, given, cutoff=0.82):
            if not name.startswith(("load", "reload")) and (section, name) != ("optimizer", FLAG):
                place = f"{section}.{name}".removeprefix(".")
                yield f"{place}=True: there is no such setting: leave it out, or set optimizer.{FLAG}=True"


def all_refusals(cfg: Any, settings: OffloadConfig) -> Iterator[str]:
    """Yield why a config whose flag may be set is refused, by anything that is known before training."""
    yield from config_refusals(cfg)
    if flag_is_set(cfg.optimizer):
        try:
            engine = choose_engine(settings, cfg.optimizer)
        except ValueError as error:
            yield str(error)
        else:
            yield from texts(OF_ENGINES, RunConfig(cfg, settings, engine))
        yield from setting_refusals(cfg, settings)


def setting_refusals(cfg: Any, settings: OffloadConfig) -> Iterator[str]:
    """Yield why settings of masters and gradients cannot be honoured."""
    return texts(OF_SETTINGS_UNDER_FSDP if uses_fsdp(cfg) else OF_SETTINGS, RunConfig(cfg, settings))


def refuse_optimizer_config(config: Any) -> None:
    """Check an OptimizerConfig whose flag is set, if there is one; raise as `refuse_config`."""
    if config is not None:
        refuse(texts(OF_OPTIMIZERS, RunConfig(SimpleNamespace(optimizer=config))))


def refuse_model_config(model_config: Any, engine: Choice, models: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError if a built model has a full-iteration CUDA graph that the engine does not serve, or GTP."""
    refuse(texts([GRAPH_OF_ITERATION, *GTP], RunConfig(SimpleNamespace(model=model_config), engine=engine)))
    _refuse_parts(models, GTP)


def refuse_gradients_of(models: Iterable[torch.nn.Module], settings: OffloadConfig) -> None:
    """Check the config of each part of built models; raise ValueError."""
    rows = [row for row in OF_SETTINGS if row.setting == GRADIENTS and row.beside[0].startswith("model.")]
    _refuse_parts(models, rows, settings)


def _refuse_parts(
    models: Iterable[torch.nn.Module], rows: list[Refusal], settings: OffloadConfig | None = None
) -> None:
    """Check the configs of all parts (MIMO's and vision models have their own) by rows that read the model's alone."""
    modules = (module for model in models for module in model.modules())
    for config in {id(found): found for module in modules if (found := getattr(module, "config", None))}.values():
        refuse(texts(rows, RunConfig(SimpleNamespace(model=config), settings)))


def captures_full_iteration(model_config: Any) -> bool:
    """Return what Bridge's `is_full_iteration_cuda_graph` does, even if Bridge is not installed."""
    implementation = setting_of(model_config, "cuda_graph_impl", "none")
    if implementation != "local":
        return implementation == "full_iteration"
    for setting in ("cuda_graph_modules", "cuda_graph_scope"):
        # An enum member, a list of them, or names joined by commas.
        value = setting_of(model_config, setting)
        items = value if isinstance(value, list | tuple) else str(value).split(",")
        if any(str(getattr(item, "name", item)).rpartition(".")[2] == "full_iteration" for item in items):
            return True
    return False


# Refusals that depend on the machine.


def refuse_small_shared_memory(checkpoint: Any, copies: list[int], ranks: int | None = None) -> None:
    """Raise ValueError if a persistent checkpoint worker could not be handed the copies of the states.

    It is a process of its own and gets each host tensor, of so many bytes in `copies` a rank, as an open file under
    PyTorch's sharing strategy "file_descriptor", and as a file in /dev/shm under "file_system". If either runs out, the
    thread that sends them prints an error, and training waits for the worker without end. (States on the GPU are sent
    as CUDA handles. In the formats that mcore gathers on the host it is the same without offload.)
    """
    if not (copies and copies_go_to_a_worker(checkpoint)):
        return
    ranks = ranks_of_this_node() if ranks is None else ranks
    shared = os.statvfs("/dev/shm")
    keeps_files_open = hands_out_descriptors()
    has_limit = not keeps_files_open and shared.f_blocks > 0  # a tmpfs without one says 0
    free, needed = shared.f_bavail * shared.f_frsize, ranks * sum(copies) if has_limit else 0
    files = len(copies) + OTHER_FILES if keeps_files_open else 0
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    of_files = "raise the limit, call torch.multiprocessing.set_sharing_strategy('file_system')"
    for what, there, wanted, how in (
        ("bytes of /dev/shm", free, needed, "start the container with a larger one (--shm-size, or --ipc=host)"),
        ("open files a process (ulimit -n)", limit, files, of_files),
    ):
        if there < wanted:
            raise ValueError(
                f"checkpoint.async_save=True with {FLAG_TEXT}: the checkpoint worker gets the states of this node's "
                f"{ranks} rank(s) through shared memory and needs up to {wanted} {what}, but there are {there}: {how}, "
                "or set checkpoint.async_save=False"
            )


def copies_go_to_a_worker(checkpoint: Any) -> bool:
    """Return whether a checkpoint's tensors are sent to a persistent worker by shared memory.

    A worker that is forked for the save has the memory; for a `fully_reshardable` checkpoint mcore gathers copies.
    """
    takes_tensors = not getattr(checkpoint, "dist_ckpt_optim_fully_reshardable", False)
    saves = checkpoint.save is not None and checkpoint.save_optim and checkpoint.async_save
    return bool(saves and takes_tensors and checkpoint.use_persistent_ckpt_worker)
