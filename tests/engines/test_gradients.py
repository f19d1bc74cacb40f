"""Gradients that have no memory before a backward, and leave between microbatches: bits, memory, order, faults."""

import dataclasses
from itertools import product
from types import SimpleNamespace

import cpu_training
import pytest
import torch
from both import CONFIGURED, OPTIMIZERS, PACKED, SMALL, as_resident, both, exact, session_of, steps, training
from lanes import in_lanes
from saving import assert_same_shards, load, newest, save

import bridge_fgo
from bridge_fgo.bridge import session
from bridge_fgo.bridge.activation_offload import PIECE_BYTES
from bridge_fgo.engines.gradients import AHEAD, MANAGED, Gradients, gradients_of
from bridge_fgo.memory import guard
from bridge_fgo.memory.transfers import Transfers

pytestmark = pytest.mark.usefixtures("cpu_standins")

BUCKETS = SMALL | {"overlap_grad_reduce": True, "bucket_size": 20_000}
"""A model of several DDP buckets."""
LAZY = dataclasses.replace(PACKED, gradients="lazy")
OFF = dataclasses.replace(PACKED, gradients=True)
THREE = BUCKETS | {"microbatches": 3}
KINDS = {
    "one_microbatch": {"microbatches": 1},
    "three_microbatches": {},
    "chunks": {"chunks": 2},
    "experts": {"experts": True},
    "frozen": {"frozen": True},
    "fp16": {"precision": "fp16"},
    "fp32_norms": {"precision": "fp32_params"},
    "gathered_in_forward": {"overlap_param_gather": True},
    "adam_not_distributed": OPTIMIZERS["adam"],
    "muon": OPTIMIZERS["muon"],
    "rerun": {"rerun_steps": frozenset({2})},
    "skipped": {"found_inf_steps": frozenset({2}), "grad_norm_skip_steps": frozenset({3})},
    "lengths": {"lengths": (32, 16, 24), "sequence": 32},
    **{name: {"configured": changes} for name, changes in CONFIGURED.items()},
    "nan_checks": {"configured": {"ddp.check_for_nan_in_grad": True}},
    "loss_per_token": {"configured": {"model.calculate_per_token_loss": True}},
    "bf16_gradients": {"configured": {"ddp.grad_reduce_in_fp32": False}},
}
"""Options, and what Bridge's config has otherwise; of three microbatches where nothing else is said."""
IN_THE_FAST_LANE = [
    ("one_microbatch", "lazy"),
    *(
        (kind, "off")
        for kind in ("chunks", "experts", "rerun", "skipped", "fp32_local_accumulation", "tied_embeddings")
    ),
]


CONFIGS = {"lazy": LAZY, "off": OFF}


def test_a_part_of_the_model_with_a_config_of_its_own_is_refused_by_that(monkeypatch):
    """As MIMO's parts have it, and a vision model whose layers a CUDA graph captures."""
    make = cpu_training.make_model

    def make_model(*how):
        model = make(*how)
        model[0].module.module.decoder.layers[1].config = SimpleNamespace(cuda_graph_impl="local")
        return model

    monkeypatch.setattr(cpu_training, "make_model", make_model)
    said = r"gradients='lazy' with model.cuda_graph_impl='local': .* set model.cuda_graph_impl='none'"
    with pytest.raises(ValueError, match=said), training(True, LAZY, **BUCKETS):
        pass


@pytest.mark.parametrize(("kind", "name"), in_lanes([*product(KINDS, CONFIGS)], IN_THE_FAST_LANE))
def test_training_is_bitwise_equal_to_resident(kind, name):
    config = CONFIGS[name]
    with as_resident(3, config, **THREE | KINDS[kind]) as run:
        steps(run, 3)
        moved = session_of(run).gradients.traffic
        assert (moved.out > 0) is (moved.back > 0) is (config is OFF and kind not in ("one_microbatch", "frozen"))


def test_each_microbatch_but_the_last_has_every_byte_that_moves_leave_and_return_as_the_figures_say():
    with as_resident(3, OFF, **THREE) as run:
        steps(run, 3)
        stats, gradients = bridge_fgo.stats(), session_of(run).gradients
        assert stats.gradient_bytes == gradients.nbytes >= gradients.moving_bytes > 0
        assert stats.gradient_bytes_offloaded == stats.gradient_bytes_reloaded == 2 * gradients.moving_bytes
        assert gradients.traffic.seconds > 0


@pytest.mark.parametrize("offloads", [False, True])
def test_pieces_of_states_and_gradients_are_short_where_mcore_offloads_activations(monkeypatch, offloads):
    limits = []
    monkeypatch.setattr(session.Session, "_offloads_activations", offloads)
    monkeypatch.setattr(Transfers, "limit_pieces", lambda self, piece_bytes: limits.append(piece_bytes))
    with training(True, OFF, **BUCKETS) as run:
        run.step()
    assert limits == [PIECE_BYTES, PIECE_BYTES] * offloads


# Memory.


def watch(run, config):
    """Note, of each forward's begin and end and after each step, states by bucket, and bytes that have memory."""
    seen, step_once, gradients = [], run.step, None
    forward_step = run._forward_step

    def note(what):
        nonlocal gradients
        gradients = session_of(run).gradients
        held = sum(bucket.nbytes for bucket in gradients.buckets if bucket.gpu is not None)
        seen.append((what, {bucket.state.name for bucket in gradients.buckets}, held))

    def forward(data_iterator, model):
        note("forward begins")
        result = forward_step(data_iterator, model)
        note("forward ends" if model is run.model[-1] else "chunk ends")
        return result

    def step():
        record = step_once()
        note("step ends")
        return record

    run._forward_step, run.step = forward, step
    return seen


WATCHED = ("one_microbatch", "three_microbatches", "experts", "rerun", "chunks")


@pytest.mark.parametrize(
    ("kind", "name"), in_lanes([*product(WATCHED, CONFIGS)], [("three_microbatches", "lazy"), ("chunks", "off")])
)
def test_what_has_memory_at_each_point_of_a_step(kind, name):
    config = CONFIGS[name]
    options = THREE | KINDS[kind] | {"layers": 4}
    with training(True, config, **options) as run:
        seen = watch(run, config)
        for number in range(3):
            run.step()
            gradients = session_of(run).gradients
            moving = [bucket.nbytes for bucket in gradients._moving]
            stays = gradients.nbytes - sum(moving)
            assert config is LAZY or len(moving) > 2
            points, forwards = list(seen), -1
            seen.clear()
            a_pass = run.options.microbatches * run.options.chunks
            for what, states, held in points:
                forwards += what == "forward begins"
                if what == "step ends":
                    assert states == {"HERE"} and held == gradients.nbytes
                elif forwards % a_pass < run.options.chunks:  # before the first backward of a pass
                    assert states == {"ABSENT"} and held == 0
                elif config is LAZY:
                    assert states == {"HERE"} and held == gradients.nbytes
                elif what == "forward ends":
                    assert stays < held <= stays + AHEAD * max(moving), "only what is prefetched"
            assert len(points) == 2 * a_pass * (2 if kind == "rerun" and number == 1 else 1) + 1


def log_what_is_held(run):
    """Have a run log, and halve, gradients and views of them that are made once, now; returns what it logs."""
    params = [param for chunk in run.model for param in chunk.parameters() if param.requires_grad]
    buffers = [each for chunk in run.model for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    held = [param.main_grad for param in params] + [b.grad_data for buffer in buffers for b in buffer.buckets]
    held += [view for param in params for view in (param.main_grad.detach(), param.main_grad.view(-1)[8:24])]
    seen, forward_step = [], run._forward_step

    def log(*_):
        seen.append(exact([each.norm() for each in held]))

    def forward(data_iterator, model):
        log()
        for number in (1, -1):
            held[number].mul_(0.5)
        result = forward_step(data_iterator, model)
        log()
        return result

    run._forward_step = forward
    for layer in run.model[-1].module.module.decoder.layers:
        layer.register_full_backward_hook(log)
    return seen


@pytest.fixture(params=["pytorch_2.12", "before"])
def pytorch(request, monkeypatch):
    if request.param == "before":
        monkeypatch.setattr(guard, "_CAN_REFUSE", False)
        monkeypatch.setattr(guard, "_COUNTS_ALL", False)


HOLDING = ("three_microbatches", "chunks", "experts", "rerun", "fp32_local_accumulation", "bf16_gradients")


@pytest.mark.parametrize(
    ("kind", "name"), in_lanes([*product(HOLDING, CONFIGS)], [("chunks", "off"), ("fp32_local_accumulation", "lazy")])
)
def test_gradients_and_views_that_somebody_holds_are_those_of_a_resident_run_whenever_used(kind, name, pytorch):
    def train(run):
        from_before = log_what_is_held(run)
        steps(run)
        seen = log_what_is_held(run)
        return steps(run, 3), seen, from_before

    both(train, CONFIGS[name], **THREE | KINDS[kind])


# The end.


def require_mcores_own(run):
    """Everything that gradients hung on a model is gone, and its buffers are one storage each."""
    for chunk in run.model:
        for group in chunk.bucket_groups:
            assert MANAGED not in vars(group)
        for param in chunk.parameters():
            assert type(param) is torch.nn.Parameter and not any(name.startswith("_bridge_fgo") for name in vars(param))
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            storage = buffer.grad_data.untyped_storage()
            views = [bucket.grad_data for bucket in buffer.buckets] + [param.main_grad for param in buffer.params]
            assert {view.untyped_storage()._cdata for view in views} == {storage._cdata}
            assert gradients_of(buffer) is None and storage.nbytes() == buffer.grad_data.nbytes
            for bucket in buffer.buckets:
                assert bucket.grad_data.storage_offset() == bucket.offset
                for param in bucket.params_list:
                    first, _ = bucket.param_to_index[param]
                    assert param.main_grad.storage_offset() == bucket.offset + first


def unset(run):
    run.cfg.optimizer.offload_optimizer_states = False


def uninstall(run):
    bridge_fgo.uninstall()


@pytest.mark.parametrize(
    ("end", "config"),
    [
        (unset, OFF),
        (uninstall, LAZY),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in ((unset, LAZY), (uninstall, OFF))),
    ],
)
def test_after_an_end_in_mid_run_the_buffers_are_mcores_and_training_goes_on_bitwise(end, config):
    with as_resident(4, config, **THREE | KINDS["chunks"]) as run:
        steps(run, 2)
        buckets = session_of(run).gradients.buckets
        before = exact([param.main_grad for chunk in run.model for param in chunk.parameters()])
        end(run)
        if end is not unset:
            assert exact([param.main_grad for chunk in run.model for param in chunk.parameters()]) == before
            require_mcores_own(run)
        run.offloads_all = False
        steps(run, 2)
        require_mcores_own(run)
        assert all(bucket._storage.nbytes() == 0 for bucket in buckets)


@pytest.mark.parametrize("moment", ["before the first step", "its optimizer is gone"])
def test_an_uninstall_gives_back_the_buffers_also(moment):
    with training(True, OFF, installed=False, **THREE) as run:
        bridge_fgo.install(OFF)
        run.step()
        bridge_fgo.uninstall()
        bridge_fgo.install(OFF)
        if moment == "its optimizer is gone":
            run.step()
            run.optimizer = run.scheduler = None
        bridge_fgo.uninstall()
        require_mcores_own(run)


def test_gradients_go_to_the_session_of_an_optimizer_that_is_built_anew():
    from megatron.bridge.training import setup

    with training(True, dataclasses.replace(OFF, master_remainders=False), **THREE) as run:
        run.step()
        old = session_of(run).gradients
        run.optimizer, run.scheduler = setup.setup_optimizer(
            run.cfg.optimizer, run.cfg.scheduler, run.model, use_gloo_process_groups=True
        )
        run.step()
        assert old.buckets == [] and session_of(run).gradients.traffic.out > 0


def test_host_memory_of_gradients_is_page_locked_with_that_of_states_and_a_failure_gives_them_back(monkeypatch):
    asked = []
    monkeypatch.setattr(session, "pin_on_every_rank", lambda engine: asked.append(engine.hosts_beside))
    with training(True, OFF, **THREE) as run:
        (hosts,) = asked
        assert sum(host.tensor.numel() for host in hosts) == session_of(run).gradients.moving_bytes > 0

    def no_host_memory(gradients):
        raise RuntimeError("could not map 1 GiB")

    monkeypatch.setattr(Gradients, "map_hosts", no_host_memory)
    with training(True, OFF, installed=False, **THREE) as run, bridge_fgo.install(OFF):
        with pytest.raises(RuntimeError, match="could not map"):
            run.step()
        require_mcores_own(run)


def test_mcores_offload_of_a_buffer_between_steps_loses_nothing():
    with as_resident(4, OFF, **THREE) as run:
        steps(run, 2)
        for buffer in run.model[0].buffers:
            buffer.offload_to_cpu(move_params=False)
            assert all(bucket.gpu is None for bucket in session_of(run).gradients.buckets)
            buffer.reload_from_cpu(move_params=False)
        steps(run, 2)


# Checkpoints.


@pytest.mark.parametrize("config", [pytest.param(LAZY, marks=pytest.mark.slow), OFF], ids=["lazy", "off"])
def test_a_checkpoint_has_the_bytes_of_a_resident_run_and_is_loaded_as_one(tmp_path, config):
    def train(run):
        steps(run, 2)
        folder = tmp_path / str(run.options.offload)
        save(run, folder)
        done = steps(run)
        load(run, folder)
        return done, steps(run)

    both(train, config, adam="te", **THREE)
    assert_same_shards(newest(tmp_path / "True"), newest(tmp_path / "False"))
