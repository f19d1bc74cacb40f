"""The table of patches: every binding of Bridge and mcore that this package replaces, and why that one.

Code that uses an offloaded tensor reloads it (`memory.guard`), so no list of readers and writers has to be complete.
Each wrapper of a reader or writer saves something; its `why` says what.
"""

from functools import partial

from bridge_fgo.bridge import activation_offload, before_training, crash, fsdp_wrappers, state_wrappers, train_step
from bridge_fgo.bridge.compat import TRAINING
from bridge_fgo.bridge.config_fields import ConfigFieldsPatch
from bridge_fgo.bridge.patch import FunctionPatch, Patch, StandAsidePatch, Wrapper

TRAIN = f"{TRAINING}.train"
MIMO = f"{TRAINING}.train_megatron_mimo"
CHECKPOINTING = f"{TRAINING}.checkpointing"

READERS = ("get_parameter_state_dp_zero", "get_parameter_state_dp_reshardable", "save_parameter_state")
"""Methods of DistributedOptimizer that read states."""

LOADERS = (
    "load_parameter_state",
    "load_parameter_state_from_dp_zero",
    "load_parameter_state_from_dp_reshardable",
    "load_parameter_state_from_fully_reshardable",
    "load_parameter_state_from_fs_model_space",
)
"""Methods of DistributedOptimizer that write the states of every parameter, one after another."""


def patches() -> list[Patch]:
    """Return the table, freshly made: a patch remembers what it replaced."""
    return [StandAsidePatch(), ConfigFieldsPatch(), *_of_bridge(), *_of_mcore(), *_of_others(), *_of_optimizers()]


def _of_mcores(
    module: str, target: str, wrapper: Wrapper, parameters: tuple[str, ...], why: str, optional: bool = True
) -> FunctionPatch:
    """Return a patch of a function of mcore's; some of its releases lack one that is `optional`."""
    return FunctionPatch(
        f"megatron.core.{module}", target, wrapper, parameters, why, "megatron-core", ((0, 15), (1, 0)), optional
    )


def _of_bridge() -> list[FunctionPatch]:
    return [
        # Before training.
        FunctionPatch(f"{TRAINING}.config", "ConfigContainer.validate", before_training.validate_config, (),
            "every road into pretrain() ends in it, before a model is built"),
        FunctionPatch(f"{TRAINING}.pretrain_megatron_mimo", "megatron_mimo_runtime_config_update",
            before_training.validate_config, ("cfg",),
            "MIMO's road into training, which skips the container's validation"),
        FunctionPatch(
            f"{TRAINING}.setup", "setup_optimizer", before_training.build_optimizer, ("optimizer_config", "model"),
            "setup() looks it up here, before it loads a checkpoint; the flag must be hidden from mcore only while the "
            "optimizer is built"),
        FunctionPatch(f"{TRAINING}.setup", "_update_model_config_funcs", before_training.after_model_hooks,
            ("optimizer", "model_config"),
            "binds finalize: the first moment at which everything exists that an engine of mcore's attaches to"),
        FunctionPatch(f"{TRAINING}.setup", "_should_load_checkpoint", crash.asks_for_checkpoint,
            ("cfg", "checkpoint_manager"),
            "the one question before a checkpoint is loaded, with what loads it, whichever manager that is"),
        FunctionPatch(f"{TRAINING}.setup", "setup_data_iterators", crash.makes_iterators, (),
            "makes the loaders' iterators, which draw random numbers as they begin"),
        FunctionPatch(f"{TRAINING}.setup", "maybe_load_dataloader_state", crash.loads_data_state, (),
            "loads the data's state of a checkpoint, of which there is none after a crash", optional=True),
        FunctionPatch(f"{TRAINING}.setup_megatron_mimo", "_update_megatron_mimo_model_config_funcs",
            before_training.after_model_hooks, ("optimizer", "model"),
            "binds finalize in the MIMO setup, before the checkpoint load"),
        FunctionPatch(f"{TRAINING}.initialize", "compile_helpers", before_training.compile_helpers, (),
            "Bridge looks it up here; mcore's own stays as it is for others"),
        # A training step.
        FunctionPatch(TRAIN, "train_step", train_step.train_step, ("model", "optimizer", "global_state"),
            "train() looks it up as a module global each run, and NVRx wraps what it finds there",
            order=train_step.STEP_ORDER),
        FunctionPatch(TRAIN, "get_rerun_state_machine", train_step.get_rerun_state_machine, (),
            "should_run_forward_backward is the only call between two passes and before grads are zeroed"),
        FunctionPatch(TRAIN, "_handle_mxfp8_param_buffer_copy", train_step.release_after, ("optimizer", "model"),
            "the last reader of the masters before forward; called in every pass, also where it does nothing"),
        FunctionPatch(MIMO, "train_step_megatron_mimo", partial(train_step.train_step, one_pass=True),
            ("model", "optimizer", "global_state"),
            "the MIMO loop looks it up as a module global",
            order=train_step.STEP_ORDER),
        FunctionPatch(MIMO, "zero_grad_buffer_for_multimodule", train_step.release_after, ("module_to_grid_tuple",),
            "the one call between the start of the MIMO step and its forward"),
        FunctionPatch(f"{TRAINING}.utils.train_utils", "report_memory", train_step.report_memory, (),
            "Bridge reads the allocator's peaks here, and the phases' figures reset them"),
        # Between steps.
        FunctionPatch(TRAIN, "clip_qk", state_wrappers.clip_qk, (),
            "writes the masters after the optimizer step. Saves mcore's generation 2, whose tensors have no "
            "guard, from stale masters"),
        FunctionPatch(TRAIN, "calc_params_l2_norm", state_wrappers.reads_all_masters, ("model",),
            "reads `param.main_param`. Saves mcore's generation 2, whose tensors have no guard, from a norm "
            "of stale masters"),
        FunctionPatch(f"{TRAINING}.eval", "evaluate", state_wrappers.make_room, ("model",),
            "both loops evaluate through it. Saves the GPU memory of states that had not been offloaded yet"),
        # Checkpoints of Megatron-FSDP.
        FunctionPatch(CHECKPOINTING, "generate_state_dict", fsdp_wrappers.makes_state_dict, (),
            "asks Megatron-FSDP for its masters as the model's parameters, whose bytes nothing reads yet. Saves all of "
            "them on the GPU"),
        FunctionPatch(
            CHECKPOINTING, "_process_state_dict_for_model_glu_interleaving", fsdp_wrappers.interleaves_masters, (),
            "reads these masters before they are saved, and is given them to be overwritten after they were loaded: "
            "inside of `own()`, where no touch counts"),
        FunctionPatch(CHECKPOINTING, "preprocess_fsdp_dtensor_state_dict", fsdp_wrappers.hands_out_states,
            (fsdp_wrappers.STATE_DICT,),
            "the last to look at the tensors of an fsdp_dtensor checkpoint before every writer of one gets them. Saves "
            "all states on the GPU in a save"),
        FunctionPatch(CHECKPOINTING, "_load_checkpoint_from_path", fsdp_wrappers.loads_checkpoint, ("optimizer",),
            "every road of a load, from the state dictionary that is loaded into to the optimizer's own. Saves all "
            "states on the GPU in a load"),
        FunctionPatch(CHECKPOINTING, "load_fsdp_dtensor_checkpoint", fsdp_wrappers.reads_checkpoint, (),
            "reads into the entries that a save writes, from wherever it is called"),
    ]  # fmt: skip


def _of_mcore() -> list[FunctionPatch]:
    buffers = "distributed.param_and_grad_buffer"
    return [
        _of_mcores(buffers, "_ParamAndGradBuffer.offload_to_cpu", state_wrappers.drops_gradients, ("move_grads",),
            "ends every offload of buffers, DDP's and any RL framework's"),
        _of_mcores(buffers, "_ParamAndGradBuffer.reset", state_wrappers.zeroes_gradients, (),
            "what DDP's zero_grad_buffer calls for each buffer, the moment from which gradients are zeros"),
        _of_mcores(buffers, "_ParamAndGradBuffer.scale_gradients", state_wrappers.scales_gradients,
            ("scaling_factor",),
            "the one other function that reads a whole buffer of gradients"),
        _of_mcores(buffers, "_ParamAndGradBucketGroup.start_grad_sync", state_wrappers.reduces_gradients, (),
            "what every reduction of gradients goes through; it reads buckets that no backward may have reached"),
        _of_mcores(
            "models.mimo.optimizer", "get_mimo_optimizer", before_training.build_optimizer, ("mimo_model", "config"),
            "the MIMO setup imports it from here when it runs"),
        _of_mcores("transformer.cuda_graphs", "TECudaGraphHelper.create_cudagraphs", state_wrappers.make_room, (),
            "train() captures layers between two steps, which takes activations' memory; vision's helper inherits it"),
        _of_mcores("full_cuda_graph", "FullCudaGraphWrapper.__call__", train_step.run_schedule, (),
            "runs, captures and replays forward and backward, and nothing in between is called in a replay"),
        _of_mcores("transformer.moe.paged_stash", "PagedStashRunner.prepare_for_rerun", train_step.pass_around, (),
            "the overflow retry does not ask the rerun machine; without it the retry runs with states resident"),
        _of_mcores("distributed.fsdp.src.megatron_fsdp.megatron_fsdp", "MegatronFSDP.install_optimized_model_weights",
            fsdp_wrappers.rewrites_weights, (),
            "what the model's load_state_dict ends in: it copies every master. Saves all masters on the GPU together"),
        *(
            _of_mcores("pipeline_parallel.fine_grained_activation_offload", target, wrapper, parameters, why)
            for target, wrapper, parameters, why in OF_ACTIVATIONS
        ),
    ]  # fmt: skip


OF_ACTIVATIONS: tuple[tuple[str, Wrapper, tuple[str, ...], str], ...] = (
    ("ChunkOffloadHandler.tensor_pop", activation_offload.takes_tensor, ("tensor_tag",),
        "every saved tensor that a backward takes; the only place that copies one back without a prefetch"),
    ("ChunkOffloadHandler.finish_all_groups", activation_offload.ends_forward, ("name",),
        "asked as each group of a forward begins; the only place that tells whether it is the next chunk's"),
    ("ChunkOffloadHandler.offload", activation_offload.copies_out, ("src_tensor",),
        "makes every host copy, in mcore's pool and, of experts, outside of it"),
    ("OffloadTensorPool.free", activation_offload.frees_buffer, ("tensor",),
        "called on the stream that reads the buffer, right after its copy was enqueued"),
    ("OffloadTensorPool.allocate", activation_offload.takes_buffer, ("shape", "dtype"),
        "called on the stream that writes the buffer, right before its copy"),
    ("OffloadTensorPool.reset", activation_offload.resets_pool, (), "ends an iteration"),
)  # fmt: skip
"""Methods of mcore's fine-grained activation offload; each wrapper says what upstream lacks."""


def _of_others() -> list[FunctionPatch]:
    return [
        FunctionPatch("transformer_engine.pytorch.cpu_offload", "OffloadableLayerState.start_offload",
            activation_offload.offloads_layer, (),
            "makes every host copy of a layer; before it the layer's saved tensors are known",
            distribution="transformer-engine", series=((0, 0), (3, 0)), optional=True),
        *(
            FunctionPatch(module, "MultiTensorApply.__call__", state_wrappers.touches_lists, (),
                "hands lists of tensors to kernels in C++, from norms and copies of anybody's, which no tensor can see",
                distribution=distribution, series=((0, 0), end), optional=True)
            for module, distribution, end in (
                ("transformer_engine.pytorch.optimizers.multi_tensor_apply", "transformer-engine", (3, 0)),
                ("apex.multi_tensor_apply.multi_tensor_apply", "apex", (1, 0)),
            )
        ),
    ]  # fmt: skip


REQUIRED = (
    "step_with_ready_grads", "_get_main_param_and_optimizer_states", "_set_main_param_and_optimizer_states",
)  # fmt: skip
"""Methods without which a DistributedOptimizer is not one that this package can step, save and load."""
STEPPING = (("step_with_ready_grads",), state_wrappers.updates_states, (), "the one way to the inner optimizer's step")
MCORES_SLEEP = (
    ("offload_to_cpu", "restore_from_cpu"), state_wrappers.refuses_mcores_sleep, (),
    "rebind parameters and states. Saves a training with precision-aware Adam from weights that change no more",
)  # fmt: skip
OF_DISTRIBUTED: tuple[tuple[tuple[str, ...], Wrapper, tuple[str, ...], str], ...] = (
    STEPPING,
    (("_build_model_and_main_param_groups",), before_training.builds_masters, (before_training.GROUPS,),
        "makes the masters of every parameter on the GPU, whose weights tell what they are"),
    (("_copy_main_params_to_model_params",), state_wrappers.copies_masters, (),
        "in each step reads what was not copied part by part. Saves a second copy, of masters that are offloaded again",
    ),
    (("_copy_main_params_to_param_buffer",), state_wrappers.reads_masters, (),
        "reads masters in each pass, beside their copies out. Saves these, which a touch would give up"),
    (("sharded_state_dict",), state_wrappers.saves_states, ("is_loading", "metadata"),
        "begins a checkpoint, and a load. Saves all states on the GPU, which are read and written on the host"),
    (("state_dict",), state_wrappers.reads_no_states, (),
        "is part of a checkpoint. Saves all states on the GPU, of which mcore then drops what TE reads; elsewhere "
        "refuses those of a step that failed"),
    (("_get_main_param_and_optimizer_states",), state_wrappers.hands_out_states, ("model_param",),
        "the one place where checkpoints of every format get the states from; gives those on the host"),
    (READERS, state_wrappers.reads_states, (),
        "reads all states. Saves a checkpoint from those of a step, or a load, that failed, and slabs from coming one "
        "by one"),
    (LOADERS, state_wrappers.loads_parameters, (),
        "writes states. Saves all of them on the GPU, and packed masters whose weights were loaded before"),
    (("load_parameter_state_from_dp_zero_legacy",), state_wrappers.overwrites_masters, (),
        "writes states where they are found. Saves packed masters whose weights were loaded before: to a touch they "
        "would be lost"),
    (("_set_main_param_and_optimizer_states",), state_wrappers.puts_states, ("model_param", "tensors"),
        "the one place where checkpoints of every format write the states; writes those on the host"),
    (("_copy_model_params_to_main_params",), state_wrappers.rewrites_masters, (),
        "writes every master, also packed ones whose weights have changed. Saves all masters on the GPU together"),
    (("load_state_dict",), state_wrappers.loads_state_dict, (),
        "replaces states. Saves the new ones on the GPU beside the old"),
    ((fsdp_wrappers.MAKING,), fsdp_wrappers.makes_states, (),
        "makes all moments before a load under Megatron-FSDP, and steps Adam past `step_with_ready_grads`. Saves all "
        "moments on the GPU together"),
    MCORES_SLEEP,
)  # fmt: skip
"""Methods of DistributedOptimizer, with what each wrapper does, the parameters that it relies on, and why."""

OF_FLOAT16: tuple[tuple[tuple[str, ...], Wrapper, tuple[str, ...], str], ...] = (
    STEPPING,
    (("__init__",), before_training.builds_float16_masters, ("optimizer",),
        "makes the masters of every parameter on the GPU, whose weights tell what they are"),
    (("_copy_main_params_to_model_params",), state_wrappers.copies_masters, (),
        "in each step reads what was not copied part by part. Saves a second copy, of masters that are offloaded again",
    ),
    (("_copy_model_params_to_main_params",), state_wrappers.rewrites_masters, (),
        "writes every master, also packed ones whose weights have changed. Saves all masters on the GPU together"),
    (("state_dict",), state_wrappers.hands_out_float16_states, ("is_loading",),
        "gives the masters and the states themselves, to checkpoints of every format. Saves all of them on the GPU"),
    (("sharded_state_dict",), state_wrappers.saves_float16_states, ("is_loading",),
        "begins a checkpoint, and a load. Saves all states on the GPU, which are read and written on the host"),
    (("load_state_dict",), state_wrappers.loads_float16_states, ("state_dict",),
        "replaces states, and writes masters. Saves the new ones on the GPU beside the old"),
    MCORES_SLEEP,
)  # fmt: skip
"""Those of Float16OptimizerWithFloat16Params, no base class of DistributedOptimizer: nothing is wrapped twice."""


def _of_optimizers() -> list[FunctionPatch]:
    return [
        _of_mcores(f"optimizer.{module}", f"{cls}.{name}", wrapper, parameters, why, optional=is_optional(name))
        for module, cls, methods, is_optional in (
            ("distrib_optimizer", "DistributedOptimizer", OF_DISTRIBUTED, lambda name: name not in REQUIRED),
            ("optimizer", "Float16OptimizerWithFloat16Params", OF_FLOAT16, lambda name: name.endswith("_cpu")),
        )
        for names, wrapper, parameters, why in methods
        for name in names
    ]
