"""Every combination that is refused: a ValueError before training that names the setting."""

import re
from types import SimpleNamespace

import pytest
import torch

import bridge_fgo
from bridge_fgo.bridge import compat
from bridge_fgo.bridge.optimizers import eligible
from bridge_fgo.states.leaves import leaves


def offloading():
    """Returns a config with the flag set; to be called with the package installed."""
    from bridge_fgo.tools.arms.cpu_model import CpuOptions, make_config

    return make_config(CpuOptions(offload=True))


@pytest.fixture
def cfg(installed):
    return offloading()


def set_path(cfg, path, value):
    section, name = path.split(".")
    setattr(getattr(cfg, section), name, value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optimizer.optimizer_cpu_offload", True),
        ("optimizer.optimizer_cuda_graph", True),
        ("optimizer.optimizer", "sgd"),
        ("optimizer.optimizer", "soap"),
        ("optimizer.optimizer", "lion"),
        ("optimizer.exp_avg_dtype", torch.uint8),
        ("optimizer.exp_avg_sq_dtype", torch.float8_e4m3fn),
        ("dist.use_torch_fsdp2", True),
    ],
)
def test_config_is_refused_by_name(cfg, path, value):
    from bridge_fgo.bridge.refusals import refuse_config

    set_path(cfg, path, value)
    with pytest.raises(ValueError, match=path.replace(".", r"\.")) as caught:
        refuse_config(cfg)
    assert "offload_optimizer_states=True" in str(caught.value)


def test_a_layer_wise_muon_with_the_distributed_optimizer_is_refused_as_bridge_cannot_build_one(cfg):
    from bridge_fgo.bridge.refusals import refuse_config

    cfg.optimizer.optimizer = "muon"
    refuse_config(cfg)
    cfg.optimizer.optimizer = "dist_muon"
    with pytest.raises(ValueError, match=r"use_distributed_optimizer=True with optimizer\.optimizer='dist_muon'"):
        refuse_config(cfg)
    cfg.optimizer.use_distributed_optimizer = cfg.ddp.use_distributed_optimizer = False
    refuse_config(cfg)


@pytest.mark.parametrize(
    ("fraction", "instead"),
    [
        (0.4, r"OffloadConfig\(fraction=0\.4\) in place of optimizer\.optimizer_offload_fraction=0\.4"),
        (1.0, r"optimizer_cpu_offload=False: the flag alone offloads every state"),
        (0.0, r"optimizer_offload_fraction=0\.0 moves nothing"),
    ],
)
def test_the_refusal_of_hybrid_device_optimizer_says_its_fraction_in_this_packages_setting(cfg, fraction, instead):
    from bridge_fgo.bridge.refusals import all_refusals

    cfg.optimizer.optimizer_cpu_offload, cfg.optimizer.optimizer_offload_fraction = True, fraction
    (refusal,) = [text for text in all_refusals(cfg, bridge_fgo.OffloadConfig()) if "HybridDevice" in text]
    assert re.search(instead, refusal)


@pytest.mark.parametrize(
    ("settings", "changes", "names"),
    [
        ({"moments": False}, {"model.bf16": False}, r"moments=False with model\.bf16=False"),
        ({"master_remainders": True}, {"model.bf16": False}, r"model\.bf16=False"),
        ({"master_remainders": True}, {"model.bf16": False, "model.fp16": True}, r"model\.fp16=True"),
        (
            {"master_remainders": True},
            {"optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8": True},
            r"optimizer\.use_precision_aware_optimizer=True",
        ),
        ({"master_remainders": True}, {"ddp.fp8_param_gather": True}, r"ddp\.fp8_param_gather=True"),
        ({"master_remainders": True}, {"ddp.fp4_param_gather": True}, r"ddp\.fp4_param_gather=True"),
        (
            {"master_remainders": True},
            {"optimizer.reuse_grad_buf_for_mxfp8_param_ag": True},
            r"optimizer\.reuse_grad_buf_for_mxfp8_param_ag=True",
        ),
    ],
)
def test_settings_of_masters_that_could_not_be_honoured_are_refused(cfg, settings, changes, names):
    from bridge_fgo.bridge.refusals import refuse_config
    from bridge_fgo.config import OffloadConfig

    cfg.model.bf16, cfg.model.fp16 = True, False
    cfg.optimizer.bf16 = False  # what it says decides nothing
    refuse_config(cfg, OffloadConfig(engine="native", **settings))
    for path, value in changes.items():
        set_path(cfg, path, value)
    with pytest.raises(ValueError, match=names):
        refuse_config(cfg, OffloadConfig(engine="native", **settings))
    refuse_config(cfg, OffloadConfig(engine="native"))


MXFP8_LAYER_WISE = {
    "optimizer.optimizer": "dist_muon",
    "ddp.overlap_param_gather": True,
    "model.fp8_recipe": "mxfp8",
    "ddp.fp8_param_gather": True,
}


def test_mxfp8_weights_that_are_gathered_from_masters_in_forward_are_refused(cfg):
    from bridge_fgo.bridge.refusals import refuse_config
    from bridge_fgo.config import OffloadConfig

    cfg.optimizer.use_distributed_optimizer = cfg.ddp.use_distributed_optimizer = False
    cfg.model.bf16 = True
    for path, value in MXFP8_LAYER_WISE.items():
        refuse_config(cfg, OffloadConfig(engine="native"))
        set_path(cfg, path, value)
    names = r"overlap_param_gather=True.*optimizer='dist_muon'.*MXFP8.*overlap_param_gather=False.*master_weights=False"
    with pytest.raises(ValueError, match=names):
        refuse_config(cfg, OffloadConfig(engine="native"))
    refuse_config(cfg, OffloadConfig(engine="native", master_weights=False))
    cfg.ddp.overlap_param_gather = False
    refuse_config(cfg, OffloadConfig(engine="native"))


def test_a_recipe_that_is_not_validated_yet_is_not_refused_for_its_masters(cfg):
    from bridge_fgo.bridge.refusals import refuse_config
    from bridge_fgo.config import OffloadConfig

    cfg.model.bf16, cfg.mixed_precision = False, "bf16_mixed"
    refuse_config(cfg, OffloadConfig(engine="native", moments=False))
    refuse_config(cfg, OffloadConfig(engine="native", master_remainders=True))


def test_fp32_without_a_distributed_optimizer_is_refused_through_validate(cfg):
    cfg.optimizer.use_distributed_optimizer = cfg.ddp.use_distributed_optimizer = False
    cfg.validate()
    cfg.model.bf16 = False
    with pytest.raises(ValueError, match=r"use_distributed_optimizer=False.*model\.bf16=False.*FP32Optimizer"):
        cfg.validate()


@pytest.mark.parametrize("name", ["muon", "dist_muon", "adaptive_muon"])
def test_muon_is_accepted_but_over_lion(cfg, name):
    from bridge_fgo.bridge.refusals import refuse_config

    cfg.optimizer.use_distributed_optimizer = cfg.ddp.use_distributed_optimizer = False
    cfg.optimizer.optimizer = name
    refuse_config(cfg)
    cfg.optimizer.muon_scalar_optimizer = "lion"
    with pytest.raises(ValueError, match=r"optimizer\.muon_scalar_optimizer='lion'"):
        refuse_config(cfg)


@pytest.mark.parametrize("engine", ["mcore generation 1", "mcore generation 2"])
def test_full_iteration_cuda_graph_is_refused_with_mcores_offloader_alone(cfg, engine):
    from bridge_fgo.bridge.refusals import refuse_config, refuse_full_iteration_graph

    cfg.model.cuda_graph_impl = "full_iteration"
    refuse_config(cfg, bridge_fgo.OffloadConfig(engine="native"))
    refuse_full_iteration_graph(cfg.model, "native")
    with pytest.raises(ValueError, match=r"full-iteration CUDA graph .*OffloadConfig\(engine='native'\)"):
        refuse_full_iteration_graph(cfg.model, engine)


@pytest.mark.parametrize("engine", ["mcore generation 1", "mcore generation 2"])
def test_async_save_of_states_that_mcores_offloader_moves_is_refused(cfg, engine):
    from bridge_fgo.bridge.refusals import refuse_async_save

    cfg.checkpoint.save, cfg.checkpoint.async_save = "somewhere", True
    with pytest.raises(ValueError, match=r"checkpoint\.async_save=True"):
        refuse_async_save(cfg.checkpoint, engine)
    refuse_async_save(cfg.checkpoint, "native")
    cfg.checkpoint.save_optim = False
    refuse_async_save(cfg.checkpoint, engine)


def test_generation_2_saves_in_torch_dist_alone(cfg):
    from bridge_fgo.bridge.refusals import refuse_checkpoint_format

    cfg.checkpoint.save, cfg.checkpoint.ckpt_format = "somewhere", "fsdp_dtensor"
    with pytest.raises(ValueError, match=r"checkpoint\.ckpt_format='fsdp_dtensor'"):
        refuse_checkpoint_format(cfg.checkpoint, "mcore generation 2")
    refuse_checkpoint_format(cfg.checkpoint, "native")


ROADS = ["validate", "mimo"]


def take_road(road, cfg, monkeypatch):
    """Has a config go one of the two ways that end in training, without Bridge's own checks there."""
    from megatron.bridge.training import pretrain_megatron_mimo as mimo

    if road == "validate":
        monkeypatch.setattr(vars(type(cfg))["validate"], "__wrapped__", lambda cfg: None)
        cfg.validate()
    else:
        monkeypatch.setattr(mimo.megatron_mimo_runtime_config_update, "__wrapped__", lambda cfg: None)
        mimo.megatron_mimo_runtime_config_update(cfg)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(("name", "value"), [("async_save", True), ("ckpt_format", "fsdp_dtensor")])
def test_what_mcores_offloader_cannot_save_is_refused_before_training(monkeypatch, cpu_standins, road, name, value):
    monkeypatch.setattr(compat, "upstream_generation", lambda: "mcore generation 2")
    with bridge_fgo.install(bridge_fgo.OffloadConfig(engine="mcore")):
        cfg = offloading()
        cfg.checkpoint.save = "somewhere"
        take_road(road, cfg, monkeypatch)
        setattr(cfg.checkpoint, name, value)
        with pytest.raises(ValueError, match=rf"checkpoint\.{name}={value!r}"):
            take_road(road, cfg, monkeypatch)


@pytest.mark.parametrize("road", ROADS)
def test_settings_of_masters_are_refused_before_training(monkeypatch, cpu_standins, road):
    with bridge_fgo.install(bridge_fgo.OffloadConfig(master_remainders=True)):
        cfg = offloading()
        take_road(road, cfg, monkeypatch)
        cfg.ddp.fp8_param_gather = True
        with pytest.raises(ValueError, match=r"master_remainders=True with ddp\.fp8_param_gather=True"):
            take_road(road, cfg, monkeypatch)


def test_mimos_road_refuses_too(monkeypatch, cfg):
    cfg.optimizer.optimizer_cpu_offload = True
    with pytest.raises(ValueError, match="optimizer_cpu_offload"):
        take_road("mimo", cfg, monkeypatch)


@pytest.mark.parametrize("name", ["offload_optimizer_states", "chunked_optimizer_state_offload"])
def test_a_flag_with_generation_2s_fraction_at_zero_is_refused(name):
    from types import SimpleNamespace

    from bridge_fgo.bridge.compat import check_flag

    config = SimpleNamespace(**{name: True}, optimizer_state_offload_fraction=0.0)
    with pytest.raises(ValueError, match="optimizer_state_offload_fraction"):
        check_flag(config)
    config.optimizer_state_offload_fraction = 0.5
    check_flag(config)


def test_nothing_is_refused_with_the_flag_unset(cfg):
    from bridge_fgo.bridge.refusals import refuse_config

    cfg.optimizer.offload_optimizer_states = False
    cfg.optimizer.optimizer = "sgd"
    cfg.dist.use_torch_fsdp2 = True
    refuse_config(cfg)


def test_training_is_refused_before_the_first_step_without_a_distributed_optimizer(installed):
    from types import SimpleNamespace

    from megatron.core.optimizer.optimizer import FP32Optimizer

    optimizer = object.__new__(FP32Optimizer)
    optimizer.config = SimpleNamespace()
    with pytest.raises(ValueError, match="FP32Optimizer"):
        eligible(optimizer)


def chain(*children):
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    optimizer = object.__new__(ChainedOptimizer)
    optimizer.chained_optimizers = list(children)
    optimizer.is_stub_optimizer = bool(children) and all(c.is_stub_optimizer for c in children)
    return optimizer


def leaf(stub=False, inner=None):
    from types import SimpleNamespace

    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    optimizer = object.__new__(DistributedOptimizer)
    optimizer.is_stub_optimizer = stub
    optimizer.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    optimizer.config = SimpleNamespace(optimizer_cuda_graph=False)
    optimizer.optimizer = None if stub else inner or torch.optim.AdamW([torch.zeros(1)])
    return optimizer


@pytest.mark.parametrize(
    ("of_optimizer", "of_model", "match"),
    [
        ({"optimizer": "sgd"}, {}, r"optimizer\.optimizer='sgd'"),
        ({"optimizer": "muon", "muon_scalar_optimizer": "lion"}, {}, r"muon_scalar_optimizer='lion'"),
    ],
)
def test_what_was_changed_after_the_validation_is_refused_when_training_attaches(
    cpu_standins, of_optimizer, of_model, match
):
    from bridge_fgo.bridge.session import Session

    optimizer = leaf()
    optimizer.config = SimpleNamespace(**{"optimizer": "adam", "use_distributed_optimizer": True, **of_optimizer})
    with pytest.raises(ValueError, match=match):
        Session(optimizer, SimpleNamespace(**of_model), bridge_fgo.OffloadConfig(engine="native"))


def test_nested_chains_and_mimo_are_walked_and_stubs_skipped(cpu_standins):
    from megatron.core.models.mimo.optimizer import MimoOptimizer

    a, b, c = leaf(), leaf(), leaf()
    mimo = object.__new__(MimoOptimizer)
    mimo._active_optimizers = [chain(a, chain(b, leaf(stub=True))), c]
    assert list(leaves(mimo))[:2] == [a, b]
    assert eligible(mimo) == [a, b, c]


def test_a_rank_with_stubs_alone_is_fine(cpu_standins):
    assert eligible(chain(leaf(stub=True), leaf(stub=True))) == []


def test_an_empty_chain_that_is_no_stub_is_refused(cpu_standins):
    with pytest.raises(ValueError, match="no DistributedOptimizer"):
        eligible(chain())


def test_hybrid_device_optimizer_is_refused_by_name(cpu_standins):
    class HybridDeviceOptimizer(torch.optim.AdamW):
        pass

    with pytest.raises(ValueError, match="optimizer_cpu_offload"):
        eligible(chain(leaf(), leaf(inner=HybridDeviceOptimizer([torch.zeros(1)]))))


def test_an_optimizer_that_is_not_adam_is_refused_by_name(cpu_standins):
    with pytest.raises(ValueError, match="SGD"):
        eligible(leaf(inner=torch.optim.SGD([torch.zeros(1)])))


def float16_leaf(inner):
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    optimizer = object.__new__(Float16OptimizerWithFloat16Params)
    optimizer.is_stub_optimizer, optimizer.optimizer = False, inner
    optimizer.config = SimpleNamespace(optimizer_cuda_graph=False)
    return optimizer


def test_what_is_inside_a_float16_optimizer_and_not_adam_or_muon_is_refused_by_name(cpu_standins):
    from emerging_optimizers.scalar_optimizers import Lion
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    accepted = [torch.optim.AdamW([torch.zeros(1)]), TensorParallelMuon([torch.zeros(1, 1)])]
    assert len(eligible(chain(*map(float16_leaf, accepted)))) == 2
    with pytest.raises(ValueError, match=r"Lion.*muon_scalar_optimizer='adam'"):
        eligible(float16_leaf(Lion([torch.zeros(1)])))


def test_engines_of_mcores_are_refused_by_name_for_what_they_do_not_serve(cpu_standins, monkeypatch):
    from bridge_fgo.bridge import compat
    from bridge_fgo.engines.making import make_engine
    from bridge_fgo.memory.meters import PeakMeter
    from bridge_fgo.states.float16 import Float16Source

    source = Float16Source(float16_leaf(torch.optim.AdamW([torch.zeros(1)])))
    for generation in ("mcore generation 1", "mcore generation 2"):
        with pytest.raises(ValueError, match=r"engine='mcore' with a Float16OptimizerWithFloat16Params"):
            make_engine(generation, [source], bridge_fgo.OffloadConfig(engine="mcore"), PeakMeter())
    monkeypatch.setattr(compat, "upstream_generation", lambda: "mcore generation 2")
    config = SimpleNamespace(optimizer="adam", use_distributed_optimizer=True)
    assert compat.choose_engine(bridge_fgo.OffloadConfig(engine="mcore"), config) == "mcore generation 2"
    config.optimizer_state_offload_fraction = 0.5
    assert compat.choose_engine(bridge_fgo.OffloadConfig(), config) == "mcore generation 2"
    for changes in ({"use_distributed_optimizer": False}, {"optimizer": "dist_muon"}):
        other = SimpleNamespace(**{**vars(config), **changes})
        with pytest.raises(ValueError, match=r"engine='mcore' with optimizer\.optimizer="):
            compat.choose_engine(bridge_fgo.OffloadConfig(engine="mcore"), other)
        with pytest.raises(ValueError, match=r"optimizer_state_offload_fraction=0\.5"):
            compat.choose_engine(bridge_fgo.OffloadConfig(), other)


def test_another_megatron_fsdp_than_the_first_is_refused_by_name(cpu_standins):
    optimizer = leaf()
    optimizer.ddp_config.use_megatron_fsdp, optimizer.model_chunks = True, [torch.nn.Linear(1, 1)]
    with pytest.raises(ValueError, match=r"use_megatron_fsdp=True and a Linear without parameter groups"):
        eligible(optimizer)


@pytest.mark.parametrize("section", ["ddp", "dist"])
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("ddp.megatron_fsdp_version", 2),
        ("checkpoint.async_save", True),
        ("checkpoint.non_persistent_ckpt_type", "local"),
    ],
)
def test_what_does_not_go_with_megatron_fsdp_is_refused_by_name(cfg, section, path, value):
    from bridge_fgo.bridge.refusals import refuse_config

    set_path(cfg, f"{section}.use_megatron_fsdp", True)
    cfg.checkpoint.save = "somewhere"
    refuse_config(cfg)
    set_path(cfg, path, value)
    with pytest.raises(ValueError, match=rf"{path}={value!r} with .*use_megatron_fsdp=True"):
        refuse_config(cfg)


@pytest.mark.parametrize(
    ("fraction", "instead"),
    [
        (0.5, "OffloadConfig(fraction=0.5) in place of optimizer.optimizer_offload_fraction=0.5"),
        (1.0, "optimizer_cpu_offload=False: the flag alone offloads every state"),
    ],
)
def test_hybrid_device_optimizer_under_megatron_fsdp_is_told_the_settings_with_its_memory(cfg, fraction, instead):
    from bridge_fgo.bridge.refusals import all_refusals

    class HybridDeviceOptimizer(torch.optim.AdamW):
        pass

    cfg.ddp.use_megatron_fsdp = True
    cfg.optimizer.optimizer_cpu_offload, cfg.optimizer.optimizer_offload_fraction = True, fraction
    (refusal,) = all_refusals(cfg, bridge_fgo.OffloadConfig())
    assert "ddp.use_megatron_fsdp=True" in refusal and instead in refusal
    assert "OffloadConfig.master_weights=False" in refusal
    built = leaf(inner=HybridDeviceOptimizer([torch.zeros(1)]))
    built.config = cfg.optimizer
    built.ddp_config.use_megatron_fsdp, built.model_chunks = True, []
    with pytest.raises(ValueError, match=re.escape(refusal)):
        eligible(built)
    cfg.optimizer.optimizer_cpu_offload = False
    assert not list(all_refusals(cfg, bridge_fgo.OffloadConfig(fraction=fraction)))
    assert not list(all_refusals(cfg, bridge_fgo.OffloadConfig(fraction=fraction, master_weights=False)))


@pytest.mark.parametrize(
    ("settings", "ddp"),
    [({"engine": "mcore"}, {}), ({"master_remainders": True}, {}), ({"moments": False}, {"main_params_dtype": None})],
)
def test_a_setting_that_megatron_fsdp_cannot_honour_is_refused_by_name(cfg, settings, ddp):
    from bridge_fgo.bridge.refusals import master_refusals

    cfg.ddp.use_megatron_fsdp = True
    assert not list(master_refusals(cfg, bridge_fgo.OffloadConfig(moments=False)))
    for name, value in ddp.items():
        setattr(cfg.ddp, f"megatron_fsdp_{name}", value)
    ((name, value),) = settings.items()
    (refusal,) = master_refusals(cfg, bridge_fgo.OffloadConfig(**settings))
    assert refusal.startswith(f"OffloadConfig.{name}={value!r} with")


def test_fp8_moments_and_cuda_graphs_of_the_built_optimizer_are_refused(cpu_standins):
    inner = torch.optim.AdamW([torch.zeros(1)])
    inner.name_to_dtype_map = {"exp_avg": torch.uint8, "exp_avg_sq": torch.float32}
    with pytest.raises(ValueError, match="exp_avg_dtype"):
        eligible(leaf(inner=inner))
    graphed = leaf()
    graphed.config.optimizer_cuda_graph = True
    with pytest.raises(ValueError, match="optimizer_cuda_graph"):
        eligible(graphed)


@pytest.mark.parametrize("asked", [{"engine": "mcore"}, {"engine": "mcore", "fraction": 0.5}])
def test_mcore_engine_is_refused_where_mcore_has_none(cpu_standins, asked):
    from bridge_fgo.bridge.compat import choose_engine
    from bridge_fgo.config import OffloadConfig

    with pytest.raises(ValueError, match=r"engine='mcore'"):
        choose_engine(OffloadConfig(**asked), SimpleNamespace())


@pytest.fixture
def background(monkeypatch, cfg):
    """A config that saves through the persistent worker, on a node of 2 ranks, 1000 bytes and 500 files.

    Memory is handed over by name, which takes the bytes and no open files.
    """
    from bridge_fgo.bridge import refusals

    monkeypatch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: "file_system")

    shared = SimpleNamespace(f_blocks=20, f_bavail=10, f_frsize=100)
    monkeypatch.setattr(refusals.os, "statvfs", lambda path: shared)
    monkeypatch.setattr(refusals.resource, "getrlimit", lambda which: (500, 500))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    cfg.checkpoint.save, cfg.checkpoint.async_save = "somewhere", True
    return cfg.checkpoint


@pytest.mark.parametrize(
    ("strategy", "copies", "match"),
    [
        ("file_system", [501], r"1002 bytes of /dev/shm.*there are 1000.*--shm-size"),
        ("file_descriptor", [1] * 300, r"556 open files.*set_sharing_strategy\('file_system'\)"),
    ],
)
def test_a_worker_that_cannot_be_handed_the_states_is_refused(monkeypatch, background, strategy, copies, match):
    from bridge_fgo.bridge.refusals import refuse_small_shared_memory

    monkeypatch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: strategy)
    with pytest.raises(ValueError, match=match):
        refuse_small_shared_memory(background, copies)
    refuse_small_shared_memory(background, [500])
    for name, value in (("save_optim", False), ("async_save", False), ("use_persistent_ckpt_worker", False)):
        before = getattr(background, name)
        setattr(background, name, value)
        refuse_small_shared_memory(background, copies)
        setattr(background, name, before)


@pytest.mark.parametrize(("strategy", "copies"), [("file_system", [1] * 300), ("file_descriptor", [10**12])])
def test_what_a_sharing_strategy_does_not_take_is_not_asked_for(monkeypatch, background, strategy, copies):
    from bridge_fgo.bridge.refusals import refuse_small_shared_memory

    monkeypatch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: strategy)
    refuse_small_shared_memory(background, copies)


def test_a_worker_that_cannot_be_handed_the_states_is_refused_before_the_first_step(background, monkeypatch, cfg):
    from bridge_fgo.tools.arms import cpu_training

    monkeypatch.setattr(cpu_training, "make_config", lambda options: cfg)
    with cpu_training.CpuTraining(cpu_training.CpuOptions(offload=True)) as training:
        with pytest.raises(ValueError, match=r"checkpoint\.async_save=True.* bytes of /dev/shm"):
            training.step()
        assert training.live_bytes == []  # no forward has begun
        background.async_save = False
        training.step()


def test_a_shared_memory_without_a_limit_is_not_taken_for_a_full_one(monkeypatch, background):
    from bridge_fgo.bridge import refusals

    unlimited = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=100)
    monkeypatch.setattr(refusals.os, "statvfs", lambda path: unlimited)
    refusals.refuse_small_shared_memory(background, [10**12])
