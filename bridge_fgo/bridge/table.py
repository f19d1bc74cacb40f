"""The table of patches: every binding of Bridge and mcore that this package replaces, and why that one."""

from __future__ import annotations

from bridge_fgo.bridge import (
    float16_wrappers,
    fsdp_loads,
    fsdp_wrappers,
    graphs,
    sleep_wrappers,
    state_wrappers,
    wrappers,
)
from bridge_fgo.bridge.config_fields import ConfigFieldsPatch
from bridge_fgo.bridge.patch import FunctionPatch, Patch
from bridge_fgo.bridge.patched_bridge import StandAsidePatch

TRAIN = "megatron.bridge.training.train"
MIMO = "megatron.bridge.training.train_megatron_mimo"
CHECKPOINTING = "megatron.bridge.training.checkpointing"
DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
OPTIMIZER = "megatron.core.optimizer.optimizer"

READERS = (
    "get_parameter_state_dp_zero",
    "get_parameter_state_dp_reshardable",
    "save_parameter_state",
)
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
    table: list[Patch] = [
        StandAsidePatch(),
        ConfigFieldsPatch(),
        FunctionPatch(
            "megatron.bridge.training.config", "ConfigContainer.validate", wrappers.validate_config, (),
            "every road into pretrain() ends in it, before a model is built",
        ),
        FunctionPatch(
            "megatron.bridge.training.pretrain_megatron_mimo", "megatron_mimo_runtime_config_update",
            wrappers.validate_mimo_config, ("cfg",),
            "MIMO's road into training, which skips the container's validation",
        ),
        FunctionPatch(
            "megatron.bridge.training.setup", "setup_optimizer", wrappers.build_optimizer,
            ("optimizer_config", "model"),
            "setup() looks it up here, before it loads a checkpoint; the flag must be hidden from mcore only while the "
            "optimizer is built",
        ),
        *(
            FunctionPatch(
                "megatron.core.distributed.param_and_grad_buffer", f"_ParamAndGradBuffer.{name}", wrapper,
                ("move_params", "move_grads"),
                "what DDP's and every RL framework's offload of buffers ends in",
                distribution="megatron-core", series=((0, 15), (1, 0)), optional=True,
            )
            for name, wrapper in (
                ("offload_to_cpu", sleep_wrappers.offloads_buffer), ("reload_from_cpu", sleep_wrappers.reloads_buffer),
            )
        ),
        FunctionPatch(
            "megatron.core.models.mimo.optimizer", "get_mimo_optimizer", wrappers.build_optimizer,
            ("mimo_model", "config"),
            "the MIMO setup imports it from here when it runs",
            distribution="megatron-core", series=((0, 15), (1, 0)), optional=True,
        ),
        FunctionPatch(
            "megatron.bridge.training.setup", "_update_model_config_funcs", wrappers.after_model_hooks,
            ("optimizer", "model_config"),
            "binds finalize: the first moment at which everything is there that an engine of mcore's attaches to",
        ),
        FunctionPatch(
            "megatron.bridge.training.setup_megatron_mimo", "_update_megatron_mimo_model_config_funcs",
            wrappers.after_model_hooks, ("optimizer", "model"),
            "binds finalize in the MIMO setup, there before the checkpoint load",
        ),
        FunctionPatch(
            DISTRIBUTED_OPTIMIZER, "DistributedOptimizer._build_model_and_main_param_groups", wrappers.builds_masters,
            (wrappers.GROUPS,),
            "makes the masters of every parameter on the GPU, whose weights tell what they are",
            distribution="megatron-core", series=((0, 15), (1, 0)), optional=True,
        ),
        FunctionPatch(
            "megatron.bridge.training.initialize", "compile_helpers", wrappers.compile_helpers, (),
            "Bridge looks it up here; mcore's own stays as it is for others",
        ),
        FunctionPatch(
            TRAIN, "train_step", wrappers.train_step, ("model", "optimizer", "global_state"),
            "train() looks it up as a module global each run, and NVRx wraps what it finds there",
            order=wrappers.STEP_ORDER,
        ),
        FunctionPatch(
            TRAIN, "get_rerun_state_machine", wrappers.get_rerun_state_machine, (),
            "should_run_forward_backward is the only call between two passes and before grads are zeroed",
        ),
        FunctionPatch(
            TRAIN, "_handle_mxfp8_param_buffer_copy", wrappers.release_after, ("optimizer", "model"),
            "the last reader of the masters before forward; called in every pass, also where it does nothing",
        ),
        FunctionPatch(
            TRAIN, "clip_qk", state_wrappers.clip_qk, (),
            "writes the masters after the optimizer step; those that mcore's own offloaders have moved have no guard",
        ),
        FunctionPatch(
            TRAIN, "calc_params_l2_norm", state_wrappers.reads_all_masters, ("model",),
            "reads `param.main_param` between steps; those that mcore's own offloaders have moved have no guard",
        ),
        FunctionPatch(
            "megatron.bridge.training.eval", "evaluate", state_wrappers.make_room, ("model",),
            "both loops evaluate through it, with states on the GPU that had not left yet",
        ),
        FunctionPatch(
            "megatron.core.transformer.cuda_graphs", "TECudaGraphHelper.create_cudagraphs",
            state_wrappers.make_room, (),
            "train() captures layers between two steps, which takes activations' memory; vision's helper inherits it",
            distribution="megatron-core", series=((0, 15), (1, 0)), optional=True,
        ),
        FunctionPatch(
            graphs.MODULE, "FullCudaGraphWrapper.__call__", graphs.run_schedule, (),
            "runs, captures and replays forward and backward, and nothing in between is called in a replay",
            distribution="megatron-core", series=((0, 15), (1, 0)), optional=True,
        ),
        FunctionPatch(
            "megatron.core.transformer.moe.paged_stash", "PagedStashRunner.prepare_for_rerun", wrappers.pass_around, (),
            "the overflow retry does not ask the rerun machine; without it the retry runs with states resident",
            distribution="megatron-core", series=((0, 15), (1, 0)), optional=True,
        ),
        FunctionPatch(
            MIMO, "train_step_megatron_mimo", wrappers.train_step_megatron_mimo,
            ("model", "optimizer", "global_state"),
            "the MIMO loop looks it up as a module global",
            order=wrappers.STEP_ORDER,
        ),
        FunctionPatch(
            MIMO, "zero_grad_buffer_for_multimodule", wrappers.release_after, ("module_to_grid_tuple",),
            "the one call between the start of the MIMO step and its forward",
        ),
        FunctionPatch(
            CHECKPOINTING, "generate_state_dict", fsdp_wrappers.makes_state_dict, (),
            "asks Megatron-FSDP for its masters as the model's parameters, whose bytes nothing reads yet",
        ),
        FunctionPatch(
            CHECKPOINTING, "_process_state_dict_for_model_glu_interleaving", fsdp_loads.interleaves_masters, (),
            "reads these masters before they are saved, and is given them to be overwritten after they were loaded",
        ),
        FunctionPatch(
            CHECKPOINTING, "preprocess_fsdp_dtensor_state_dict", fsdp_wrappers.hands_out_states,
            (fsdp_wrappers.STATE_DICT,),
            "the last to look at the tensors of an fsdp_dtensor checkpoint before every writer of one gets them",
        ),
        FunctionPatch(
            CHECKPOINTING, "_load_checkpoint_from_path", fsdp_loads.loads_checkpoint, ("optimizer",),
            "every road of a load, from the state dictionary that is loaded into to the optimizer's own",
        ),
        FunctionPatch(
            CHECKPOINTING, "load_fsdp_dtensor_checkpoint", fsdp_loads.reads_checkpoint, (),
            "reads into the entries that a save writes, from wherever it is called",
        ),
        FunctionPatch(
            "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp",
            "MegatronFSDP.install_optimized_model_weights", fsdp_loads.rewrites_weights, (),
            "what the model's load_state_dict ends in: it copies every master, outside of any optimizer step",
            distribution="megatron-core", series=((0, 15), (1, 0)), optional=True,
        ),
        FunctionPatch(
            "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp",
            "MegatronFSDP._replace_param_with_distributed_if_needed", fsdp_wrappers.reads_masters, (),
            "makes the masters the model's parameters, for whoever asks for a state dictionary: they come in one go",
            distribution="megatron-core", series=((0, 15), (1, 0)), optional=True,
        ),
        *(
            FunctionPatch(
                module, "MultiTensorApply.__call__", state_wrappers.touches_lists, (),
                "hands lists of tensors to kernels in C++, from norms and copies of anybody's, which no tensor can see",
                distribution=distribution, series=((0, 0), end), optional=True,
            )
            for module, distribution, end in (
                ("transformer_engine.pytorch.optimizers.multi_tensor_apply", "transformer-engine", (3, 0)),
                ("apex.multi_tensor_apply.multi_tensor_apply", "apex", (1, 0)),
            )
        ),
        FunctionPatch(
            "megatron.bridge.training.utils.train_utils", "report_memory", wrappers.report_memory, (),
            "Bridge reads the allocator's peaks here, and the phases' figures reset them",
        ),
    ]  # fmt: skip
    for names, wrapper, parameters, why in (
        (("step_with_ready_grads",), state_wrappers.updates_states, (), "the one way to the inner optimizer's step"),
        (
            ("_copy_main_params_to_model_params",), state_wrappers.copies_masters, (),
            "reads what was not copied part by part",
        ),
        (
            ("_copy_main_params_to_param_buffer",),
            state_wrappers.reads_masters, (),
            "reads masters in each pass, beside their copies out, which a touch would give up",
        ),
        (
            ("sharded_state_dict",), state_wrappers.saves_states, ("is_loading", "metadata"),
            "begins a checkpoint, and a load",
        ),
        (("state_dict",), state_wrappers.reads_no_states, (), "reads states, also where mcore then drops them"),
        (
            ("_get_main_param_and_optimizer_states",), state_wrappers.hands_out_states, ("model_param",),
            "the one place where checkpoints of every format get the states from",
        ),
        (
            READERS, state_wrappers.reads_states, (),
            "reads all states: they come in one go, not slab by slab, and those of a step that failed are refused",
        ),
        (LOADERS, state_wrappers.loads_parameters, (), "writes states, from wherever it is called"),
        (
            ("load_parameter_state_from_dp_zero_legacy",), state_wrappers.overwrites_masters, (),
            "writes states where they are found, and not by parameter",
        ),
        (
            ("_set_main_param_and_optimizer_states",), state_wrappers.puts_states, ("model_param", "tensors"),
            "the one place where checkpoints of every format write the states",
        ),
        (
            ("_copy_model_params_to_main_params",), state_wrappers.rewrites_masters, (),
            "writes every master, from wherever it is called",
        ),
        (("load_state_dict",), state_wrappers.loads_state_dict, (), "replaces states, from wherever it is called"),
        (
            (fsdp_loads.MAKING,), fsdp_loads.makes_states, (),
            "makes all moments before a load under Megatron-FSDP, and steps Adam past `step_with_ready_grads`",
        ),
        (("offload_to_cpu",), sleep_wrappers.moves_states_to_cpu, (), "rebinds parameters, to make room"),
        (("restore_from_cpu",), sleep_wrappers.restores_states, (), "rebinds parameters, as the room is theirs again"),
    ):  # fmt: skip
        table += [
            FunctionPatch(
                DISTRIBUTED_OPTIMIZER, f"DistributedOptimizer.{name}", wrapper, parameters, why,
                distribution="megatron-core", series=((0, 15), (1, 0)), optional=name != "step_with_ready_grads",
            )
            for name in names
        ]  # fmt: skip
    # No base class of DistributedOptimizer, and itself no DistributedOptimizer: nothing is wrapped twice.
    table += [
        FunctionPatch(
            OPTIMIZER, f"Float16OptimizerWithFloat16Params.{name}", wrapper, parameters, why,
            distribution="megatron-core", series=((0, 15), (1, 0)), optional=name.endswith("_cpu"),
        )
        for name, wrapper, parameters, why in (
            (
                "__init__", float16_wrappers.builds_masters, ("optimizer",),
                "makes the masters of every parameter on the GPU, whose weights tell what they are",
            ),
            ("step_with_ready_grads", state_wrappers.updates_states, (), "the one way to the inner optimizer's step"),
            (
                "_copy_main_params_to_model_params", float16_wrappers.copies_masters, (),
                "reads what was not copied part by part",
            ),
            (
                "_copy_model_params_to_main_params", float16_wrappers.rewrites_masters, (),
                "writes every master, from wherever it is called",
            ),
            (
                "state_dict", float16_wrappers.hands_out_states, ("is_loading",),
                "gives the masters and the states themselves, to checkpoints of every format",
            ),
            (
                "sharded_state_dict", float16_wrappers.saves_states, ("is_loading",),
                "begins a checkpoint, and a load",
            ),
            (
                "load_state_dict", float16_wrappers.loads_states, ("state_dict",),
                "replaces states, and writes masters, from wherever it is called",
            ),
            ("offload_to_cpu", state_wrappers.replaces_states, (), "rebinds parameters and states, to make room"),
            ("restore_from_cpu", state_wrappers.replaces_states, (), "rebinds them, as the room is theirs again"),
        )
    ]  # fmt: skip
    return table
