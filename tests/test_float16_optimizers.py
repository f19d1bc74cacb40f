"""Optimizers with masters of whole parameters, in Bridge's real train_step: Adam that is not distributed, and Muon."""

from __future__ import annotations

import copy
import dataclasses

import async_worker
import pytest
import torch
from both import both
from saving import load, save
from test_checkpoints import assert_same_shards, background, finish, session_of, training
from test_parity import DEFAULTS, SMALL_SLABS, released

import bridge_fgo
from bridge_fgo.offload.schedule import Schedule
from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining

pytestmark = pytest.mark.usefixtures("cpu_standins")

STEPS = 12
ADAM = {"distributed": False}
MUON = {"distributed": False, "optimizer": "muon"}
LAYER_WISE = {"distributed": False, "optimizer": "dist_muon"}
OPTIMIZERS = {"adam": ADAM, "muon": MUON, "dist_muon": LAYER_WISE}
ADAPTIVE = {"distributed": False, "optimizer": "adaptive_muon"}
TROUBLE = {"rerun_steps": frozenset({2, 5}), "grad_norm_skip_steps": frozenset({4, 8})}

SCENARIOS = {
    "adam": ADAM,
    "adam_with_trouble": ADAM | TROUBLE | {"found_inf_steps": frozenset({3, 6})},
    "adam_in_fp16_with_loss_scaling": ADAM | {"precision": "fp16"},
    "adam_with_native_fp32_parameters": ADAM | {"precision": "fp32_params"},
    "adam_of_experts_in_two_chunks": ADAM | {"experts": True, "chunks": 2},
    "adam_with_most_parameters_frozen": ADAM | {"frozen": True},
    "muon_with_trouble": MUON | TROUBLE,
    "muon_of_experts": MUON | {"experts": True},
    "muon_with_native_fp32_parameters": MUON | {"precision": "fp32_params"},
    "dist_muon_with_trouble": LAYER_WISE | TROUBLE,
    "dist_muon_of_experts": LAYER_WISE | {"experts": True},
}

FAST = ("adam_with_trouble", "muon_with_trouble", "dist_muon_with_trouble")
"""What the fast lane trains; the slow one has the rest."""


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SCENARIOS]
)
def test_12_steps_are_bitwise_equal_to_resident_with_every_state_off_in_forward_and_backward(name):
    options = SCENARIOS[name]
    in_fp16 = options.get("precision") == "fp16"  # whose masters cannot be copied in part
    resident, record, stats = both(DEFAULTS if in_fp16 else SMALL_SLABS, STEPS, **options)
    assert len({step.loss for step in record.steps if step.loss is not None}) > STEPS // 2
    assert record.peak_forward_backward_bytes == 0 < resident.peak_forward_backward_bytes
    assert stats.released_bytes == stats.state_bytes == stats.offloaded_bytes > 0


@pytest.mark.parametrize("options", [ADAM, MUON])
def test_adam_has_12_bytes_a_parameter_and_muon_8(options):
    with bridge_fgo.install(SMALL_SLABS), CpuTraining(CpuOptions(offload=True, **options)) as training:
        training.step()
        stats = bridge_fgo.stats()
        sizes = {}
        for leaf in training.optimizer.chained_optimizers:
            sizes[type(leaf.optimizer).__name__] = sum(param.numel() for param in leaf.get_parameters())
    muon = sizes.pop("TensorParallelMuon", 0)
    assert stats.state_bytes == 8 * muon + 12 * sum(sizes.values())
    assert (muon > 0) == (options is MUON)


SHARES = [{"fraction": 0.5}, {"moments": False}, {"master_weights": False}]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        pytest.param(changes, name, marks=() if SHARES.index(changes) == number else pytest.mark.slow)
        for changes in SHARES
        for number, name in enumerate(OPTIMIZERS)
    ],
)
def test_a_share_of_the_states_is_bitwise_equal_and_keeps_the_rest(name, changes):
    config = dataclasses.replace(DEFAULTS, **changes)
    _, record, stats = both(config, 5, **OPTIMIZERS[name])
    assert 0 < stats.offloaded_bytes < stats.state_bytes
    assert record.peak_forward_backward_bytes == stats.state_bytes - stats.offloaded_bytes


@pytest.fixture
def adaptive(monkeypatch):
    """mcore 0.19's AdaptiveMuon with what emerging-optimizers 0.3 reads and its constructor does not set."""
    from megatron.core.optimizer import emerging_optimizers

    for name, value in (("scale_mode", "spectral"), ("extra_scale_factor", 1.0)):
        monkeypatch.setattr(emerging_optimizers.TensorParallelAdaptiveMuon, name, value, raising=False)


@pytest.mark.usefixtures("adaptive")
def test_adaptive_muon_offloads_a_second_moment_of_each_element():
    _, record, stats = both(SMALL_SLABS, 5, **ADAPTIVE)
    assert record.peak_forward_backward_bytes == 0
    assert stats.offloaded_bytes == stats.state_bytes


@pytest.mark.usefixtures("adaptive")
def test_adaptive_muon_keeps_a_second_moment_of_each_row_on_the_gpu():
    resident, record, stats = both(SMALL_SLABS, 5, **ADAPTIVE, moment2="normuon")
    assert record.peak_forward_backward_bytes == resident.state_bytes - stats.state_bytes < resident.state_bytes // 100


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reload_states_brings_all_back_and_what_is_written_then_is_trained_on(name):
    def trained(offload):
        with CpuTraining(CpuOptions(offload=offload, **OPTIMIZERS[name])) as training:
            for number in range(6):
                training.step()
                if number in (1, 3):
                    bridge_fgo.reload_states()
                    for kind, factor in (("masters", 1.25), ("moments", 0.5)):
                        for _, tensor in training.state_tensors()[kind]:
                            tensor.data.mul_(factor)
            return training.digests()

    resident = trained(False)
    with bridge_fgo.install(SMALL_SLABS):
        assert trained(True) == resident


@pytest.mark.parametrize("options", [ADAM, MUON, ADAM | {"precision": "fp16"}])
def test_weights_that_are_loaded_while_offloaded_stay(options):
    with bridge_fgo.install(DEFAULTS), CpuTraining(CpuOptions(offload=True, **options)) as training:
        training.step()
        released(training)
        with torch.no_grad():
            for parameter in training.model[0].parameters():
                parameter.fill_(0.5)
        training.optimizer.reload_model_params()
        assert training.live_state_bytes() == 0, "masters that were away are written part by part, and leave again"
        bridge_fgo.reload_states()
        assert all(bool((t == 0.5).all()) for _, t in training.state_tensors()["masters"])


def note_largest_logits(training):
    """Have each layer's attention keep its largest logit of each head, as Transformer Engine's does for QK-clip."""

    def note(attention, args):
        query, key = (tensor.detach().float() for tensor in args[:2])  # (sequence, batch, heads, channels)
        largest = torch.einsum("sbhc,tbhc->hbst", query, key).flatten(1).amax(1) / query.shape[-1] ** 0.5
        before = attention.current_max_attn_logits
        attention.current_max_attn_logits = largest if before is None else torch.maximum(before, largest)

    for layer in training.model[0].module.module.decoder.layers:
        attention = layer.self_attention.core_attention
        attention.current_max_attn_logits = None
        attention.register_forward_pre_hook(note)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("muon", SMALL_SLABS),
        *(
            pytest.param(name, config, marks=pytest.mark.slow)
            for name, config in (("muon", DEFAULTS), ("adam", SMALL_SLABS), ("dist_muon", SMALL_SLABS))
        ),
    ],
)
def test_mcores_qk_clip_scales_weights_and_masters_that_are_away(monkeypatch, name, config):
    from megatron.core.transformer.attention import SelfAttention

    scaled, clip = [], SelfAttention._clip_linear_qkv

    def noted(attention, weight):
        before = weight.clone()
        result = clip(attention, weight)
        scaled.append((weight.dtype, bool((result != before).any())))
        return result

    monkeypatch.setattr(SelfAttention, "_clip_linear_qkv", noted)

    def trained(offload):
        with CpuTraining(CpuOptions(offload=offload, **OPTIMIZERS[name] | TROUBLE)) as training:
            training.cfg.model.qk_clip, training.cfg.model.qk_clip_threshold = True, 0.05
            note_largest_logits(training)
            records = []
            for _ in range(4):
                record = training.step()
                records.append((record.loss, record.grad_norm))
                assert not offload or max(training.live_bytes) == 0
            return records, training.digests()

    resident = trained(False)
    in_resident = list(scaled)
    assert set(in_resident) == {(torch.float32, True), (torch.bfloat16, True)}, "each clip changed master and weight"
    scaled.clear()
    with bridge_fgo.install(config):
        assert trained(True) == resident
    assert scaled == in_resident


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_norm_of_parameters_reads_masters_that_are_away(bridge_train, name):
    def norms(offload):
        with CpuTraining(CpuOptions(offload=offload, **OPTIMIZERS[name])) as training:
            training.step()
            if offload:
                released(training)
            return bridge_train.calc_params_l2_norm(training.model, training.cfg.model)

    resident = norms(False)
    with bridge_fgo.install(SMALL_SLABS):
        assert norms(True) == resident > 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_that_mcores_own_offload_to_cpu_has_moved_are_trained_on(monkeypatch, name):
    def trained(offload):
        with CpuTraining(CpuOptions(offload=offload, **OPTIMIZERS[name])) as training:
            for _ in range(2):
                training.step()
            if offload:
                bridge_fgo.reload_states()
                before = dict(training.state_tensors()["moments"])
                with monkeypatch.context() as patch:  # it rebinds every parameter and state to a copy
                    patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
                    patch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
                    training.optimizer.offload_to_cpu()
                assert all(tensor is not before[name] for name, tensor in training.state_tensors()["moments"])
                training.optimizer.restore_from_cpu()
            for _ in range(2):
                training.step()
                assert not offload or max(training.live_bytes) == 0
            return training.digests()

    resident = trained(False)
    with bridge_fgo.install(SMALL_SLABS):
        assert trained(True) == resident


# The order of updates.


def updates(monkeypatch, landed, options):
    """Train with what has landed as said; return the parameters of every step in the order of their updates."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    seen, orthogonalize = [], TensorParallelMuon.orthogonalize

    def noted(muon, param, grad, **kwargs):
        params = [id(each) for group in whole.param_groups for each in group["params"]]
        seen.append(params.index(id(param)))
        return orthogonalize(muon, param, grad, **kwargs)

    with monkeypatch.context() as patch, CpuTraining(CpuOptions(**options)) as training:
        muon = next(leaf.optimizer for leaf in training.optimizer.chained_optimizers if "Muon" in str(leaf.optimizer))
        # While a part is updated, the param groups of the optimizer itself have its parameters alone.
        whole = torch.optim.SGD([{"params": list(group["params"])} for group in muon.param_groups])
        patch.setattr(TensorParallelMuon, "orthogonalize", noted)
        if options.get("offload"):
            parts = session_of(training).engine.schedule.parts
            patch.setattr(Schedule, "_has_landed", lambda schedule, part: landed(parts.index(part)))
            for number, part in enumerate(parts):
                part.stays = number % 3 == 1
        for _ in range(3):
            training.step()
    return seen


@pytest.mark.parametrize("changes", [{}, {"fraction": 0.7}])
def test_the_order_of_muons_updates_is_that_of_its_parameters_whatever_stays_and_has_landed(monkeypatch, changes):
    # With tensor parallelism each update may wait for the same update of other ranks.
    monkeypatch.setattr("bridge_fgo.memory.layout.LEAST_PART_BYTES", 2**17)
    resident = updates(monkeypatch, lambda number: True, MUON)
    config = dataclasses.replace(DEFAULTS, **changes)
    with bridge_fgo.install(config):
        for landed in (lambda number: True, lambda number: False, lambda number: number < 3):
            assert updates(monkeypatch, landed, MUON | {"offload": True}) == resident
    assert resident[: len(resident) // 3] == sorted(resident[: len(resident) // 3])


# Checkpoints.


@pytest.fixture(scope="module")
def saved(cpu_standins, tmp_path_factory):
    """Save after three steps, resident and offloaded; return the folders, and digests then and two steps later."""
    folders, digests = {}, {}
    for name, options in OPTIMIZERS.items():
        for offload in (False, True):
            folders[name, offload] = tmp_path_factory.mktemp(f"{name}_{offload}")
            with training(offload, **options) as run:
                for _ in range(3):
                    run.step()
                if offload:
                    released(run)
                save(run, folders[name, offload])
                assert not offload or run.live_state_bytes() == 0, "a save leaves states where they are"
                digests[name, offload] = [run.digests()]
                for _ in range(2):
                    run.step()
                digests[name, offload].append(run.digests())
        assert digests[name, True] == digests[name, False]
    return folders, digests


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tensor_bytes_on_disk_equal_those_of_a_resident_run(saved, name):
    assert_same_shards(saved[0][name, True], saved[0][name, False])


def resumed(folder, name, offload, stepped):
    """Load a checkpoint, into a run that has `stepped` or not; return digests after the load and two steps later."""
    with training(offload, **OPTIMIZERS[name]) as run:
        if stepped:
            run.step()
        load(run, folder)
        assert not offload or run.live_state_bytes() == 0, "nothing was loaded to the GPU"
        digests = [run.digests()]
        if not stepped:
            for _ in range(3 * run.options.microbatches):  # the data goes on where the run was saved
                next(run._batches)
            run._batches.advance()
        for _ in range(2):
            run.step()
            assert not offload or max(run.live_bytes) == 0
        return [*digests, run.digests()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("was", "will_be"), [(True, True), (True, False), (False, True)])
def test_a_resumed_run_is_bitwise_the_one_that_was_saved(saved, name, was, will_be):
    folders, digests = saved
    assert resumed(folders[name, was], name, will_be, stepped=False) == digests[name, False]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_that_is_loaded_over_states_that_are_there_is_bitwise_as_in_a_resident_run(saved, name):
    folders, digests = saved
    mine = resumed(folders[name, True], name, True, stepped=True)
    assert mine == resumed(folders[name, False], name, False, stepped=True)
    assert mine[0] == digests[name, False][0]


def tensors(value):
    """Yield every tensor in a nested state dictionary."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_dictionary_shares_no_memory_with_states_and_equals_a_resident_runs(name):
    dictionaries = []
    for offload in (False, True):
        with training(offload, **OPTIMIZERS[name]) as run:
            for _ in range(2):
                run.step()
            if offload:
                released(run)
            dictionaries.append(run.optimizer.state_dict())
            if offload:
                slabs = session_of(run).engine.slabs
                spans = [(s.host.address, s.host.address + s.nbytes) for s in slabs]
                mine = {s.gpu.untyped_storage()._cdata for s in slabs}
                for tensor in tensors(dictionaries[1]):
                    assert tensor.untyped_storage()._cdata not in mine
                    assert not any(start <= tensor.data_ptr() < end for start, end in spans)
                before = [tensor.clone() for tensor in tensors(dictionaries[1])]
                run.step()
                assert all(torch.equal(a, b) for a, b in zip(before, tensors(dictionaries[1]), strict=True))
    # Of the resident run the tensors are the states themselves, which have not changed since.
    pairs = list(zip(tensors(dictionaries[0]), tensors(dictionaries[1]), strict=True))
    assert len(pairs) > 30
    assert all(torch.equal(a, b) for a, b in pairs)


def back_in_time(offload, options, saved_after, config=SMALL_SLABS):
    """Train, take a state dictionary, train on, load it again; return the digests after the load and later."""
    with training(offload, config, **options) as run:
        for _ in range(saved_after):
            run.step()
        kept = copy.deepcopy(run.optimizer.state_dict())
        for _ in range(2):
            run.step()
        if offload:
            session_of(run).begin_pass()
            session_of(run).release()
        again = copy.deepcopy(kept)
        run.optimizer.load_state_dict(dict(enumerate(again)) if isinstance(again, list) else again)
        digests = [run.digests()]
        for _ in range(2):
            run.step()
            assert not offload or config.fraction < 1 or max(run.live_bytes) == 0
        return [*digests, run.digests()]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        *((SMALL_SLABS, name) for name in OPTIMIZERS),
        *(
            pytest.param(
                dataclasses.replace(DEFAULTS, fraction=0.5), name, marks=() if name == "muon" else pytest.mark.slow
            )
            for name in OPTIMIZERS
        ),
    ],
)
def test_torchs_state_dictionary_is_loaded_where_states_are_and_trained_on_from_there(name, config):
    assert back_in_time(True, OPTIMIZERS[name], 2, config) == back_in_time(False, OPTIMIZERS[name], 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_dictionary_from_before_the_first_step_starts_the_states_anew(name):
    mine, resident = (back_in_time(offload, OPTIMIZERS[name], 0) for offload in (True, False))
    assert mine[1]["params"] == resident[1]["params"]
    assert mine[1] == resident[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_dictionary_without_states_is_loaded_before_the_first_step(name):
    digests = {}
    for offload in (False, True):
        with training(offload, **OPTIMIZERS[name]) as run:
            kept = copy.deepcopy(run.optimizer.state_dict())
            run.optimizer.load_state_dict(dict(enumerate(kept)) if isinstance(kept, list) else kept)
            for _ in range(2):
                run.step()
            digests[offload] = run.digests()
    assert digests[True] == digests[False]


def test_the_layer_wise_optimizers_own_file_is_written_and_loaded_while_states_are_away(tmp_path):
    digests = {}
    for offload in (False, True):
        file = tmp_path / f"{offload}.pt"
        with training(offload, **LAYER_WISE) as run:
            for _ in range(2):
                run.step()
            if offload:
                released(run)
            run.optimizer.save_state_dict_to_file(str(file))
            for _ in range(2):
                run.step()
            if offload:
                released(run)
            run.optimizer.load_state_dict_from_file(str(file))
            assert not offload or run.live_state_bytes() == 0
            digests[offload] = run.digests()
    assert digests[True] == digests[False]
    files = [torch.load(tmp_path / f"{offload}.pt") for offload in (False, True)]
    pairs = list(zip(*(tensors(file) for file in files), strict=True))
    assert len(pairs) > 30
    assert all(torch.equal(a, b) for a, b in pairs)


def test_bridges_torch_format_writes_the_layer_wise_optimizers_file(tmp_path):
    folders = {}
    for offload in (False, True):
        folders[offload] = tmp_path / str(offload)
        with training(offload, **LAYER_WISE) as run:
            for _ in range(2):
                run.step()
            run.cfg.checkpoint.ckpt_format = "torch"
            save(run, folders[offload])
    files = [torch.load(next(folder.rglob("layer_wise_optimizer_0.pt"))) for folder in folders.values()]
    pairs = list(zip(*(tensors(file) for file in files), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def weights_of_their_own(monkeypatch):
    """Have a writer get copies of the model's weights, as it has of a GPU's before training goes on.

    Here they are whole tensors in host memory, which torch shares with the writer's process, and the next step changes.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    prepare = FileSystemWriterAsync.prepare_write_data

    def prepared(writer, plan, planner):
        prepare(writer, plan, planner)
        for _, _, (_, tensors) in writer.write_buckets:
            is_state = [item.index.fqn.startswith("optimizer") for item, _ in tensors]
            tensors[:] = [
                (item, tensor if of_optimizer else tensor.clone())
                for (item, tensor), of_optimizer in zip(tensors, is_state, strict=True)
            ]

    monkeypatch.setattr(FileSystemWriterAsync, "prepare_write_data", prepared)


@pytest.mark.slow
@pytest.mark.usefixtures("deadline", "weights_of_their_own")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("worker", ["fork", "mcore"])
def test_checkpoints_in_the_background_have_the_bytes_of_their_step(tmp_path, monkeypatch, worker, name):
    if worker != "fork":
        async_worker.have_bridge_use(worker, monkeypatch.setattr, quickly=True)
    for offload in (False, True):
        with training(offload, **OPTIMIZERS[name]) as run:
            if offload:
                background(run, worker, tmp_path)
            for number in range(2):
                run.step()
                save(run, tmp_path / str(offload) / str(number))
            run.step()  # overwrites every state and every host buffer while the writer may still read
            if offload:
                assert max(run.live_bytes) == 0
                finish(run)
    for number in range(2):
        assert_same_shards(tmp_path / "True" / str(number), tmp_path / "False" / str(number))
