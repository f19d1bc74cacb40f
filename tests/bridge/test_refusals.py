"""Every combination that is refused: a ValueError before training that names the settings, their values, what to do."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import bridge_fgo
from bridge_fgo.bridge import compat, refusals
from bridge_fgo.bridge.optimizers import eligible
from bridge_fgo.bridge.refusals import RunConfig, all_refusals, config_refusals, refuse_config
from bridge_fgo.states.choice import leaves

NATIVE = bridge_fgo.OffloadConfig(engine="native")


def offloading():
    """Returns a config with the flag set; to be called with the package installed."""
    from cpu_model import CpuOptions, make_config

    return make_config(CpuOptions(offload=True))


@pytest.fixture
def cfg(installed, monkeypatch):
    monkeypatch.setattr(compat, "upstream_generation", lambda: "mcore generation 2")
    cfg = offloading()
    cfg.model.bf16, cfg.model.fp16 = True, False
    cfg.optimizer.bf16 = False  # what it says decides nothing
    return cfg


SAVED = {"checkpoint.save": "somewhere"}
REMAINDERS = {"OffloadConfig.master_remainders": True}
LAZY = {"OffloadConfig.gradients": "lazy", "ddp.overlap_grad_reduce": True}
OFF = LAZY | {"OffloadConfig.gradients": True}
IN_FILE = {"OffloadConfig.nvme_folder": "disk"}
SURVIVE = {"OffloadConfig.survive_crash": True}
OF_MCORE = {"OffloadConfig.engine": "mcore"}
WHOLE = {"optimizer.use_distributed_optimizer": False}
FSDP = {"ddp.use_megatron_fsdp": True}
LAYER_WISE = (
    {"optimizer.optimizer": "dist_muon"},
    {"optimizer.optimizer": "muon", "optimizer.use_layer_wise_distributed_optimizer": True},
)
ROWS = {
    name: rows
    for name, rows in vars(refusals).items()
    if isinstance(rows, list) and all(isinstance(row, refusals.Refusal) for row in rows)
}
REFUSED = {
    "OF_OPTIMIZERS": [
        *({"optimizer.optimizer": name} for name in ("sgd", "soap", "lion")),
        *(
            WHOLE | {"optimizer.optimizer": name, "optimizer.muon_scalar_optimizer": "lion"}
            for name in ("muon", "dist_muon", "adaptive_muon")
        ),
        *(muon | {"optimizer.use_distributed_optimizer": True} for muon in LAYER_WISE),
        {"optimizer.optimizer_cpu_offload": True},
        {"optimizer.optimizer_cuda_graph": True},
        {"optimizer.exp_avg_dtype": torch.uint8},
        {"optimizer.exp_avg_sq_dtype": torch.float8_e4m3fn},
    ],
    "OF_CONFIGS": [
        {"dist.use_torch_fsdp2": True},
        WHOLE | {"model.bf16": False},
        {"model.gtp_weight_remat_size": 2},
        {"model.expert_gtp_weight_remat_size": 4},
    ],
    "UNDER_FSDP": [
        *({f"{section}.use_megatron_fsdp": True, "ddp.megatron_fsdp_version": 2} for section in ("ddp", "dist")),
        FSDP | SAVED | {"checkpoint.async_save": True},
        FSDP | SAVED | {"checkpoint.non_persistent_ckpt_type": "local"},
    ],
    "OF_ENGINES": [
        OF_MCORE | {"model.cuda_graph_impl": "full_iteration"},
        OF_MCORE | SAVED | {"checkpoint.ckpt_format": "fsdp_dtensor"},
        OF_MCORE | SAVED | {"checkpoint.async_save": True},
    ],
    "OF_SETTINGS": [
        {"OffloadConfig.moments": False, "model.bf16": False},
        *(
            WHOLE | muon | {"ddp.overlap_param_gather": True, "model.fp8_recipe": "mxfp8", "ddp.fp8_param_gather": True}
            for muon in LAYER_WISE
        ),
        REMAINDERS | {"model.bf16": False},
        REMAINDERS | {"model.fp16": True},
        REMAINDERS | {"optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8": True},
        REMAINDERS | {"optimizer.reuse_grad_buf_for_mxfp8_param_ag": True},
        REMAINDERS | {"ddp.fp8_param_gather": True},
        REMAINDERS | {"ddp.fp4_param_gather": True},
        SURVIVE | {"optimizer.reuse_grad_buf_for_mxfp8_param_ag": True},
        SURVIVE | {"ddp.fp8_param_gather": True},
        SURVIVE | {"ddp.fp4_param_gather": True},
        SURVIVE | {"model.qk_clip": True},
        SURVIVE | {"model.fp8": "hybrid"},
        SURVIVE | {"optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8": True},
        SURVIVE | {"model.bf16": False},
        *(SURVIVE | WHOLE | muon for muon in LAYER_WISE),
        SURVIVE | {"model.cuda_graph_impl": "full_iteration"},
        IN_FILE | {"model.cuda_graph_impl": "full_iteration"},
        LAZY | {"ddp.overlap_grad_reduce": False},
        LAZY | {"ddp.nccl_ub": True},
        LAZY | {"optimizer.reuse_grad_buf_for_mxfp8_param_ag": True},
        LAZY | {"model.moe_single_grouped_weight": True},
        LAZY | {"model.moe_single_grouped_bias": True},
        LAZY | {"model.cuda_graph_impl": "transformer_engine"},
        LAZY | {"model.vision_cuda_graph_impl": "transformer_engine"},
        *(LAZY | WHOLE | muon for muon in LAYER_WISE),
        *(
            OFF | {f"model.{name}": True}
            for name in (
                *("delay_wgrad_compute", "overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap"),
                "overlap_dispatch_backward_with_experts_wgrad",
            )
        ),
    ],
    "OF_SETTINGS_UNDER_FSDP": [
        FSDP | OF_MCORE,
        FSDP | REMAINDERS,
        FSDP | IN_FILE,
        FSDP | LAZY,
        FSDP | SURVIVE,
        FSDP | {"OffloadConfig.moments": False, "ddp.megatron_fsdp_main_params_dtype": None},
    ],
}
"""Of each table what its rows refuse, in their order: the settings in which a config differs from one that is fine."""
BY_DEFAULT = {
    *("OffloadConfig.engine", "ddp.use_megatron_fsdp", "optimizer.use_distributed_optimizer"),
    "ddp.overlap_grad_reduce",
}
"""Settings without which something else is refused, or another row says it."""


def asked(cfg, changes, patch):
    """Returns what a run asks for that differs in some settings."""
    settings = {"engine": "native"}
    for path, value in changes.items():
        section, name = path.split(".")
        if section == "OffloadConfig":
            settings[name] = value
        else:
            patch.setattr(getattr(getattr(cfg, section), compat.TRANSFORMER, getattr(cfg, section)), name, value, False)
    engine = "mcore generation 2" if settings["engine"] == "mcore" else "native"
    return RunConfig(cfg, bridge_fgo.OffloadConfig(**settings), engine)


@pytest.mark.parametrize("model", ["a provider", "a builder's config, as saved"])
@pytest.mark.parametrize("table", REFUSED)
def test_each_row_refuses_its_combination_alone_by_name_and_says_what_to_do(cfg, monkeypatch, table, model):
    if model != "a provider":
        cfg.model = SimpleNamespace(seq_length=1, transformer=cfg.model)
    unseen = list(ROWS[table])
    for changes in REFUSED[table]:
        with monkeypatch.context() as patch:
            run = asked(cfg, changes, patch)
            (row,) = [row for row in ROWS[table] if row.text_for(run) in all_refusals(cfg, run.settings)]
            assert [row.text_for(run)] == list(all_refusals(cfg, run.settings)), changes
            with pytest.raises(ValueError, match=re.escape(row.text_for(run))):
                refuse_config(cfg, run.settings)
            names = [name for name in (row.setting, *row.beside) if re.fullmatch(r"\w+\.\w+", name)]
            assert names and all(
                f"{compat.as_named_in(cfg.model, name)}={run[name]!r}" in row.text_for(run) for name in names
            )
            assert re.search(r"[;:,] (or )?(set|use|leave) ", row.text_for(run))
            unseen = [each for each in unseen if each is not row]
        for left in changes.keys() - BY_DEFAULT:
            with monkeypatch.context() as patch:
                run = asked(cfg, {path: value for path, value in changes.items() if path != left}, patch)
                assert row.text_for(run) not in all_refusals(cfg, run.settings), (changes, left)
    assert not unseen
    assert not list(all_refusals(cfg, NATIVE))


def test_the_rows_of_every_table_are_tested():
    assert ROWS.keys() - {"FP8_MOMENTS", "GTP"} == REFUSED.keys()


MXFP8 = {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}
EXPERTS = {"expert_model_parallel_size": 2, "num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall"}


@pytest.mark.parametrize(
    ("precision", "overlap", "advice"),
    [
        ({}, {}, "comm_overlap.overlap_grad_reduce=True (which Megatron-Bridge copies to ddp)"),  # of one rank
        (MXFP8, {"overlap_grad_reduce": True}, "mixed_precision.fp8_param_gather=False (which Megatron-Bridge copies "),
        (
            {}, {name: True for name in ("overlap_grad_reduce", "overlap_moe_expert_parallel_comm")},
            "comm_overlap.overlap_moe_expert_parallel_comm=False (which Megatron-Bridge copies to model)",
        ),
    ],
)  # fmt: skip
def test_advice_on_what_bridge_copies_between_sections_is_accepted_when_followed(cfg, precision, overlap, advice):
    from megatron.bridge.training.comm_overlap import CommOverlapConfig
    from megatron.bridge.training.mixed_precision import MixedPrecisionConfig

    run = bridge_fgo.OffloadConfig(gradients=True)
    cfg.ddp.overlap_grad_reduce = True
    vars(cfg.model).update(EXPERTS)

    def refused(precision, overlap):
        cfg.mixed_precision = MixedPrecisionConfig(bf16=True, **precision)
        cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False, data_parallel_size=1, **overlap)
        cfg.mixed_precision.setup(cfg.model, cfg.optimizer, cfg.ddp)
        cfg.comm_overlap.finalize()
        cfg.comm_overlap.setup(cfg.model, cfg.optimizer, cfg.ddp)
        return list(all_refusals(cfg, run))

    (refusal,) = refused(precision, overlap)
    assert advice in refusal and "set ddp." not in refusal
    followed = [
        {name: value == "True" for name, value in re.findall(rf"{source}\.(\w+)=(True|False)", refusal)}
        for source in ("mixed_precision", "comm_overlap")
    ]
    assert refused(precision | followed[0], overlap | followed[1]) == []
    cfg.mixed_precision = cfg.comm_overlap = None
    assert refusals.as_set_in(cfg, "set ddp.nccl_ub=False") == "set ddp.nccl_ub=False"


ACCEPTED = [
    *(WHOLE | {"optimizer.optimizer": name} for name in ("muon", "dist_muon", "adaptive_muon")),
    REFUSED["OF_SETTINGS"][1] | {"OffloadConfig.master_weights": False},
    # A recipe that Bridge has not validated.
    {"model.bf16": False, "OffloadConfig.moments": False},
    REMAINDERS | {"model.bf16": False},
    {"model.cuda_graph_impl": "full_iteration"},
    SAVED | {"checkpoint.async_save": True},
    SAVED | {"checkpoint.ckpt_format": "fsdp_dtensor"},
    OF_MCORE | SAVED | {"checkpoint.async_save": True, "checkpoint.save_optim": False},
    FSDP | {"OffloadConfig.moments": False},
    FSDP | SAVED,
]


@pytest.mark.parametrize("changes", ACCEPTED)
def test_what_is_served_is_not_refused(cfg, monkeypatch, changes):
    if "model.bf16" in changes:
        cfg.mixed_precision = "bf16_mixed"
    run = asked(cfg, changes, monkeypatch)
    assert not list(all_refusals(cfg, run.settings))


def test_what_no_engine_of_mcores_serves_is_refused_with_generation_1_too(cfg):
    cfg.model.cuda_graph_impl, cfg.checkpoint.save, cfg.checkpoint.async_save = "full_iteration", "somewhere", True
    found = [row.setting for row in refusals.OF_ENGINES if row.applies(RunConfig(cfg, NATIVE, "mcore generation 1"))]
    assert found == ["model.cuda_graph_impl", "checkpoint.async_save"]


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
def test_both_roads_into_training_refuse_by_the_settings_that_are_installed(monkeypatch, cpu_standins, road):
    monkeypatch.setattr(compat, "upstream_generation", lambda: "mcore generation 2")
    with bridge_fgo.install(bridge_fgo.OffloadConfig(engine="mcore")):
        cfg = offloading()
        cfg.checkpoint.save = "somewhere"
        take_road(road, cfg, monkeypatch)
        cfg.checkpoint.async_save = True
        with pytest.raises(ValueError, match=r"checkpoint\.async_save=True"):
            take_road(road, cfg, monkeypatch)


@pytest.mark.parametrize(
    ("fsdp", "fraction", "instead"),
    [
        (False, 0.4, "OffloadConfig(fraction=0.4) in place of optimizer.optimizer_offload_fraction=0.4"),
        (False, 1.0, "optimizer_cpu_offload=False: the flag alone offloads every state"),
        (False, 0.0, "optimizer_offload_fraction=0.0 moves nothing"),
        (True, 0.5, "OffloadConfig(fraction=0.5) in place of optimizer.optimizer_offload_fraction=0.5"),
    ],
)
def test_the_refusal_of_hybrid_device_optimizer_says_its_fraction_in_our_setting(cfg, fsdp, fraction, instead):
    cfg.ddp.use_megatron_fsdp = fsdp
    cfg.optimizer.optimizer_cpu_offload, cfg.optimizer.optimizer_offload_fraction = True, fraction
    (refusal,) = all_refusals(cfg, bridge_fgo.OffloadConfig())
    assert instead in refusal
    assert fsdp == ("ddp.use_megatron_fsdp=True" in refusal) == ("OffloadConfig.master_weights=False" in refusal)
    cfg.optimizer.optimizer_cpu_offload = False
    assert not list(all_refusals(cfg, bridge_fgo.OffloadConfig(fraction=fraction or 1.0)))


def test_nothing_is_refused_with_the_flag_unset(cfg):
    cfg.optimizer.offload_optimizer_states = False
    cfg.optimizer.optimizer = "sgd"
    cfg.dist.use_torch_fsdp2 = True
    assert not list(config_refusals(cfg)) and not list(all_refusals(cfg, NATIVE))


# Optimizers as they were built.


def bare(cls, **attributes):
    """Return an object with attributes that its class did not make."""
    made = object.__new__(cls)
    vars(made).update(attributes)
    return made


def chain(*children):
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    is_stub = bool(children) and all(child.is_stub_optimizer for child in children)
    return bare(ChainedOptimizer, chained_optimizers=list(children), is_stub_optimizer=is_stub)


def leaf(stub=False, inner=None, graph=False, fsdp=False, **of_inner):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    inner = None if stub else inner or torch.optim.AdamW([torch.zeros(1)])
    made = bare(
        DistributedOptimizer, is_stub_optimizer=stub, ddp_config=SimpleNamespace(use_megatron_fsdp=fsdp),
        config=SimpleNamespace(optimizer_cuda_graph=graph), optimizer=inner, model_chunks=[torch.nn.Linear(1, 1)],
    )  # fmt: skip
    vars(inner or made).update(of_inner)
    return made


def float16_leaf(inner):
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    return bare(Float16OptimizerWithFloat16Params, is_stub_optimizer=False, optimizer=inner, config=None)


def fp32_optimizer():
    from megatron.core.optimizer.optimizer import FP32Optimizer

    return bare(FP32Optimizer, config=SimpleNamespace())


def lion():
    from emerging_optimizers.scalar_optimizers import Lion

    return Lion([torch.zeros(1)])


def test_stubs_and_float16_optimizers_are_served_and_nested_chains_and_mimo_are_walked(cpu_standins):
    from megatron.core.models.mimo.optimizer import MimoOptimizer

    a, b, c = leaf(), leaf(), leaf()
    mimo = bare(MimoOptimizer, _active_optimizers=[chain(a, chain(b, leaf(stub=True))), c])
    assert list(leaves(mimo))[:2] == [a, b]
    assert eligible(mimo) == [a, b, c]
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    assert eligible(chain(leaf(stub=True), leaf(stub=True))) == []
    accepted = [torch.optim.AdamW([torch.zeros(1)]), TensorParallelMuon([torch.zeros(1, 1)])]
    assert len(eligible(chain(*map(float16_leaf, accepted)))) == 2


BUILT = {
    "FP32Optimizer": fp32_optimizer,
    "no DistributedOptimizer": lambda: chain(),
    "SGD": lambda: leaf(inner=torch.optim.SGD([torch.zeros(1)])),
    "HybridDeviceOptimizer.*optimizer_cpu_offload=False": lambda: leaf(inner=type("HybridDeviceOptimizer", (), {})()),
    r"Lion.*muon_scalar_optimizer='adam'": lambda: float16_leaf(lion()),
    "use_megatron_fsdp=True and a Linear without parameter groups": lambda: leaf(fsdp=True),
    "exp_avg_dtype=torch.uint8": lambda: leaf(name_to_dtype_map={"exp_avg": torch.uint8, "exp_avg_sq": torch.float32}),
    "optimizer_cuda_graph=True.*optimizer_cuda_graph=False": lambda: leaf(graph=True),
    "AdamW.*capturable=True.*optimizer_cuda_graph=False": lambda: leaf(capturable=True),  # as TE's FusedAdam has it
}


@pytest.mark.parametrize("match", BUILT)
def test_a_built_optimizer_that_cannot_be_offloaded_is_refused_by_name(cpu_standins, match):
    with pytest.raises(ValueError, match=match):
        eligible(BUILT[match]())


def test_engines_of_mcores_are_refused_by_name_for_what_they_do_not_serve(cpu_standins):
    from bridge_fgo.engines.ranks import make_engine
    from bridge_fgo.memory.meters import PeakMeter
    from bridge_fgo.states.float16 import Float16Source

    source = Float16Source(float16_leaf(torch.optim.AdamW([torch.zeros(1)])))
    for generation in ("mcore generation 1", "mcore generation 2"):
        with pytest.raises(ValueError, match=r"engine='mcore' with a Float16OptimizerWithFloat16Params"):
            make_engine(generation, [source], bridge_fgo.OffloadConfig(engine="mcore"), PeakMeter())


@pytest.fixture
def background(monkeypatch, cfg):
    """A config that saves through the persistent worker, on a node of 2 ranks, 1000 bytes and 500 files.

    Memory is handed over by name, which takes the bytes and no open files.
    """
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
        # What a sharing strategy does not take is not asked for.
        ("file_system", [1] * 300, None),
        ("file_descriptor", [10**12], None),
    ],
)
def test_a_worker_that_cannot_be_handed_the_states_is_refused(monkeypatch, background, strategy, copies, match):
    monkeypatch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: strategy)
    with pytest.raises(ValueError, match=match) if match else nullcontext():
        refusals.refuse_small_shared_memory(background, copies)
    refusals.refuse_small_shared_memory(background, [500])
    for name, value in (("save_optim", False), ("async_save", False), ("use_persistent_ckpt_worker", False)):
        with monkeypatch.context() as patch:
            patch.setattr(background, name, value)
            refusals.refuse_small_shared_memory(background, copies)


def test_a_worker_that_cannot_be_handed_the_states_is_refused_before_the_first_step(background, monkeypatch, cfg):
    import cpu_training

    monkeypatch.setattr(cpu_training, "make_config", lambda options: cfg)
    with cpu_training.CpuTraining(cpu_training.CpuOptions(offload=True)) as training:
        with pytest.raises(ValueError, match=r"checkpoint\.async_save=True.* bytes of /dev/shm"):
            training.step()
        assert training.live_bytes == []  # no forward has begun
        background.async_save = False
        training.step()


def test_a_shared_memory_without_a_limit_is_not_taken_for_a_full_one(monkeypatch, background):
    unlimited = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=100)
    monkeypatch.setattr(refusals.os, "statvfs", lambda path: unlimited)
    refusals.refuse_small_shared_memory(background, [10**12])
