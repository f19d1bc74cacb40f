"""install() and uninstall(): idempotent, exact, all or nothing; a module that is imported later is patched then."""

import importlib
import inspect
import re
import subprocess
import sys
import warnings
from types import ModuleType

import pytest
from wrapt import FunctionWrapper

import bridge_fgo
from bridge_fgo.bridge import patch, settings, table
from bridge_fgo.bridge.patch import FunctionPatch
from bridge_fgo.bridge.table import patches


def bindings():
    """Return every binding of the modules and classes that the table touches."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    modules = {patch.module for patch in patches()} & set(sys.modules)
    owners = [sys.modules[name] for name in sorted(modules)]
    config = sys.modules["megatron.bridge.training.config"]
    owners += [DistributedOptimizer, config.ConfigContainer, *config.OptimizerConfig.__mro__[:2]]
    found = {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()}
    for cls in config.OptimizerConfig.__mro__[:2]:
        found[(cls.__qualname__, "fields")] = tuple(cls.__dataclass_fields__)
        found[(cls.__qualname__, "annotations")] = tuple(cls.__annotations__)
    return found


def changed(before):
    """Return which bindings are not what they were."""
    after = bindings()
    assert after.keys() == before.keys()
    return [key for key in before if before[key] is not after[key] and before[key] != after[key]]


TRAINING = """
optimizer_state_offload.EXTERNAL_DRIVER config.ConfigContainer.validate
pretrain_megatron_mimo.megatron_mimo_runtime_config_update
setup.setup_optimizer setup._update_model_config_funcs setup._should_load_checkpoint setup.setup_data_iterators
setup.maybe_load_dataloader_state
setup_megatron_mimo._update_megatron_mimo_model_config_funcs initialize.compile_helpers
train.train_step train.get_rerun_state_machine train._handle_mxfp8_param_buffer_copy train.clip_qk
train.calc_params_l2_norm eval.evaluate utils.train_utils.report_memory
train_megatron_mimo.train_step_megatron_mimo train_megatron_mimo.zero_grad_buffer_for_multimodule
checkpointing.generate_state_dict checkpointing._process_state_dict_for_model_glu_interleaving
checkpointing.preprocess_fsdp_dtensor_state_dict checkpointing._load_checkpoint_from_path
checkpointing.load_fsdp_dtensor_checkpoint
"""
MCORE = """
optimizer.optimizer_config.OptimizerConfig.offload_optimizer_states models.mimo.optimizer.get_mimo_optimizer
transformer.cuda_graphs.TECudaGraphHelper.create_cudagraphs
distributed.param_and_grad_buffer._ParamAndGradBuffer.offload_to_cpu
distributed.param_and_grad_buffer._ParamAndGradBuffer.reset
distributed.param_and_grad_buffer._ParamAndGradBuffer.scale_gradients
distributed.param_and_grad_buffer._ParamAndGradBucketGroup.start_grad_sync
transformer.moe.paged_stash.PagedStashRunner.prepare_for_rerun full_cuda_graph.FullCudaGraphWrapper.__call__
distributed.fsdp.src.megatron_fsdp.megatron_fsdp.MegatronFSDP.install_optimized_model_weights
"""
ACTIVATIONS = """
ChunkOffloadHandler.offload ChunkOffloadHandler.tensor_pop ChunkOffloadHandler.finish_all_groups
OffloadTensorPool.allocate OffloadTensorPool.free OffloadTensorPool.reset
"""
DISTRIBUTED_OPTIMIZER = """
step_with_ready_grads _copy_main_params_to_model_params _copy_main_params_to_param_buffer
_copy_model_params_to_main_params sharded_state_dict state_dict _get_main_param_and_optimizer_states
get_parameter_state_dp_zero get_parameter_state_dp_reshardable save_parameter_state load_parameter_state
load_parameter_state_from_dp_zero load_parameter_state_from_dp_reshardable load_parameter_state_from_fully_reshardable
load_parameter_state_from_fs_model_space load_parameter_state_from_dp_zero_legacy load_state_dict offload_to_cpu
restore_from_cpu _build_model_and_main_param_groups _set_main_param_and_optimizer_states
_init_optimizer_states_with_dummy_values
"""
FLOAT16_OPTIMIZER = """
__init__ step_with_ready_grads _copy_main_params_to_model_params _copy_model_params_to_main_params state_dict
sharded_state_dict load_state_dict offload_to_cpu restore_from_cpu
"""


def test_the_table_has_every_binding_that_a_training_goes_through():
    # Some have a second line behind them, so that no other test fails where one is gone.
    assert {patch.name for patch in patches()} == {
        *(f"megatron.bridge.training.{name}" for name in TRAINING.split()),
        *(f"megatron.core.{name}" for name in MCORE.split()),
        *(f"megatron.core.pipeline_parallel.fine_grained_activation_offload.{name}" for name in ACTIVATIONS.split()),
        *(
            f"megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.{name}"
            for name in DISTRIBUTED_OPTIMIZER.split()
        ),
        *(
            f"megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params.{name}"
            for name in FLOAT16_OPTIMIZER.split()
        ),
        "transformer_engine.pytorch.cpu_offload.OffloadableLayerState.start_offload",
        "transformer_engine.pytorch.optimizers.multi_tensor_apply.MultiTensorApply.__call__",
        "apex.multi_tensor_apply.multi_tensor_apply.MultiTensorApply.__call__",
    }


def test_every_patch_of_the_table_is_applied_once_and_uninstall_leaves_every_binding_identical(cpu_standins):
    import megatron.bridge.training.pretrain_megatron_mimo
    import megatron.core.models.mimo.optimizer
    import megatron.core.transformer.moe.paged_stash  # noqa: F401
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    optional = {patch.name for patch in patches() if patch.module.split(".")[0] in ("transformer_engine", "apex")}
    before = bindings()
    handle = bridge_fgo.install()
    assert {patch.name for patch in handle._applied} == {patch.name for patch in patches()} - optional
    assert hasattr(DistributedOptimizer.state_dict, "__wrapped__")
    patched = bindings()
    assert bridge_fgo.install() is bridge_fgo.install(bridge_fgo.OffloadConfig()) is handle
    assert changed(patched) == []
    bridge_fgo.uninstall()
    assert changed(before) == []


def test_no_method_of_the_distributed_optimizer_is_wrapped_twice(installed):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def wrappers(name):
        return [owner for owner in DistributedOptimizer.__mro__ if isinstance(vars(owner).get(name), FunctionWrapper)]

    found = {name: wrappers(name) for name in dir(DistributedOptimizer)}
    assert found["state_dict"] == found["step_with_ready_grads"] == [DistributedOptimizer]
    assert all(owners in ([], [DistributedOptimizer]) for owners in found.values())


@pytest.mark.parametrize(
    ("first", "named"), [(None, r"fraction=1\.0"), (bridge_fgo.OffloadConfig(fraction=0.25), r"fraction=0\.25")]
)
def test_install_with_other_settings_is_refused_and_without_takes_those_that_are_installed(cpu_standins, first, named):
    refusal = rf"fraction=0\.5.* after install\(.*{named}.*uninstall"
    with bridge_fgo.install(first) as handle:
        with pytest.raises(ValueError, match=refusal):
            bridge_fgo.install(bridge_fgo.OffloadConfig(fraction=0.5))
        with bridge_fgo.install() as again:
            assert again is handle and handle.config == (first or bridge_fgo.OffloadConfig())


@pytest.mark.parametrize("settings", [{}, {"fraction": 0.5}, "native"])
def test_settings_that_are_none_are_refused_at_once(settings):
    refusal = re.escape(f"install({settings!r}): give the settings as bridge_fgo.OffloadConfig")
    with pytest.raises(ValueError, match=refusal):
        bridge_fgo.install(settings)
    with bridge_fgo.install(), pytest.raises(ValueError, match="OffloadConfig"):
        bridge_fgo.install(settings)


def test_a_block_takes_back_its_own_call_only_and_an_earlier_handle_leaves_a_later_install_alone(bridge_train):
    original = bridge_train.train_step
    with bridge_fgo.install() as handle:
        for _ in range(3):  # a fault adds up
            with bridge_fgo.install(), handle:  # a library makes sure that it is installed
                pass
            assert bridge_train.train_step is not original
    assert bridge_train.train_step is original
    with pytest.MonkeyPatch.context() as changes, bridge_fgo.install() as handle:
        changes.setattr(handle, "apply_loaded", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bridge_fgo.install()
    assert bridge_train.train_step is original
    with bridge_fgo.install() as handle:
        handle.uninstall()
        assert bridge_train.train_step is original
    bridge_fgo.install()
    with bridge_fgo.install():
        pass
    assert bridge_train.train_step is not original
    for _ in range(2):
        bridge_fgo.uninstall()
        assert bridge_train.train_step is original

    with bridge_fgo.install() as earlier:
        earlier.uninstall()
        later = bridge_fgo.install(bridge_fgo.OffloadConfig(fraction=0.5))
        patched = bridge_train.train_step
    earlier.uninstall()
    assert bridge_train.train_step is patched and hasattr(patched, "__wrapped__")
    later.uninstall()


@pytest.mark.parametrize("fails", [False, True], ids=["", "block fails"])
def test_an_uninstall_that_fails_at_the_end_of_a_block_is_an_error_that_hides_none_of_the_blocks(bridge_train, fails):
    with pytest.raises(KeyError if fails else RuntimeError) as caught, bridge_fgo.install():
        ours = bridge_train.train_step
        bridge_train.train_step = lambda *args: None
        if fails:
            raise KeyError("the user's")
    bridge_train.train_step = ours
    bridge_fgo.uninstall()
    assert "train_step" in (caught.value.__notes__[0] if fails else str(caught.value))


@pytest.mark.parametrize("place", ["train.train_step", "train.clip_qk", "config.OptimizerConfig.__init__"])
def test_an_uninstall_that_finds_a_patch_on_its_own_undoes_nothing_and_ends_no_session(monkeypatch, make_loop, place):
    with bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native")):
        loop = make_loop()
        loop.step()
        before = bindings()
        with monkeypatch.context() as on_top:
            on_top.setattr(f"megatron.bridge.training.{place}", lambda *args, **kwargs: None)
            with pytest.raises(RuntimeError, match=rf"megatron\.bridge\.training\.{place} was replaced after"):
                bridge_fgo.uninstall()
        assert changed(before) == []
        assert "close" not in loop.events and bridge_fgo.stats() is not None


@pytest.fixture
def versions(monkeypatch):
    """Return what has the packages be of other versions."""
    return lambda bridge, core: monkeypatch.setattr(
        patch, "version_of", {"megatron-bridge": bridge, "megatron-core": core}.__getitem__
    )


@pytest.mark.parametrize(
    ("bridge", "core", "said"),
    [
        ("0.5.9", "0.19.2", r"megatron-bridge from 0\.6 on, found 0\.5\.9"),
        ("0.6.2", "0.14.0", r"megatron-core from 0\.15 on, found 0\.14\.0"),
    ],
)
def test_an_older_bridge_and_an_mcore_that_was_not_read_are_refused(versions, cpu_standins, bridge, core, said):
    versions(bridge, core)
    with pytest.raises(RuntimeError, match=said):
        bridge_fgo.install()


def test_a_newer_bridge_that_fits_is_patched_with_one_warning_and_a_checkout_by_its_signatures(versions, bridge_train):
    versions("0.7.0", "0.20.0")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with bridge_fgo.install():
            assert hasattr(bridge_train.train_step, "__wrapped__")
    said = [str(one.message) for one in caught if str(one.message).startswith("bridge_fgo:")]
    assert len(said) == 1 and "megatron-bridge 0.7.0" in said[0] and "below 0.7" in said[0]

    versions("unknown", "unknown")
    before = inspect.signature(bridge_train.train_step)
    with bridge_fgo.install():
        assert hasattr(bridge_train.train_step, "__wrapped__")
        assert inspect.signature(bridge_train.train_step) == before
        assert bridge_train.train_step.__name__ == "train_step"


@pytest.mark.parametrize("newer", [False, True])
def test_a_changed_signature_is_refused_by_name_and_patches_nothing(monkeypatch, versions, bridge_train, newer):
    before = bindings()
    if newer:
        versions("0.7.0", "0.20.0")
    monkeypatch.setattr(bridge_train, "train_step", lambda forward_step_func, everything_else: None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="bridge_fgo")  # of what is refused it is not said that it goes on
        with pytest.raises(RuntimeError, match=r"train_step.* has no parameter.*global_state.*have it take \*args"):
            bridge_fgo.install()
    monkeypatch.undo()
    assert changed(before) == []


@pytest.mark.parametrize("target", ["gone", "Gone.method"])
def test_a_binding_that_is_gone_is_named_and_an_optional_one_left_out(monkeypatch, target):
    monkeypatch.setattr(patch, "version_of", lambda name: "0.6.1")
    module = ModuleType("fake_train")
    before = dict(vars(module))
    with pytest.raises(RuntimeError, match=rf"fake_train\.{target}: it is not there in 0\.6\.1"):
        FunctionPatch("fake_train", target, lambda *args: None, (), "").check(module)
    optional = FunctionPatch("fake_train", target, lambda *args: None, ("model",), "", optional=True)
    for step in (optional.check, optional.apply):
        step(module)
    optional.check_undo()
    optional.undo()
    assert dict(vars(module)) == before


BEFORE_IMPORT = """
import sys
import bridge_fgo
assert "torch" not in sys.modules, "importing the package must not import torch"
handle = bridge_fgo.install()
assert "megatron.bridge" not in sys.modules
from bridge_fgo.tools.standins.cuda import install_standins
install_standins()
import megatron.bridge.training.train as train
from megatron.bridge.training.config import OptimizerConfig
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
assert hasattr(train.train_step, "__wrapped__")
assert OptimizerConfig(offload_optimizer_states=True).offload_optimizer_states is True
handle.uninstall()
assert type(train.train_step).__name__ == "function"
assert not hasattr(CoreOptimizerConfig(), "offload_optimizer_states")
print("ok")
"""


@pytest.mark.slow
def test_install_before_bridge_is_imported():
    done = subprocess.run([sys.executable, "-c", BEFORE_IMPORT], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("ok"), done.stderr[-3000:]


# Modules that are imported after install().


@pytest.fixture
def late(monkeypatch, tmp_path):
    """The name of a module that is not imported yet; the table has the first of its two functions."""
    name = f"late_{tmp_path.name}"  # a name of its own in each test: a hook that was not called stays
    (tmp_path / f"{name}.py").write_text("def train_step(model): return model\n\nevaluate = train_step\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(patch, "version_of", lambda name: "0.6.2")
    one = FunctionPatch(name, "train_step", lambda wrapped, instance, args, kwargs: "patched", ("model",), "")
    monkeypatch.setattr(table, "patches", lambda: [one])
    yield name
    sys.modules.pop(name, None)


def test_a_module_that_does_not_fit_fails_its_import_and_is_patched_once_the_cause_is_gone(monkeypatch, late):
    bridge_fgo.install()
    with monkeypatch.context() as too_old:
        too_old.setattr(patch, "version_of", lambda name: "0.5.0")
        with pytest.raises(RuntimeError, match=r"found 0\.5\.0"):
            importlib.import_module(late)
    with bridge_fgo.install(bridge_fgo.OffloadConfig(fraction=0.5)):  # refused if the first were installed still
        assert importlib.import_module(late).train_step(1) == "patched"


@pytest.mark.parametrize("imported", ["before", "after"])
def test_any_error_of_a_patch_leaves_nothing_installed(monkeypatch, late, imported):
    works, fails = [*table.patches(), FunctionPatch(late, "evaluate", lambda *args: None, (), "")]
    apply = fails.apply

    def fail(module):
        apply(module)  # what it has done by then is undone too
        raise TypeError("of an apply")

    monkeypatch.setattr(fails, "apply", fail)
    monkeypatch.setattr(table, "patches", lambda: [works, fails])
    with pytest.raises(TypeError, match="of an apply"):
        if imported == "before":
            importlib.import_module(late)
        bridge_fgo.install()
        importlib.import_module(late)
    assert not settings.is_installed()
    monkeypatch.setattr(table, "patches", lambda: [works])
    module = importlib.import_module(late)
    assert module.train_step(1) == module.evaluate(1) == 1
    with bridge_fgo.install():
        assert module.train_step(1) == "patched"


def test_a_module_imported_after_an_uninstall_is_left_as_it_is(late):
    bridge_fgo.install().uninstall()
    assert importlib.import_module(late).train_step(1) == 1
