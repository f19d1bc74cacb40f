"""States, gradients and sleeps that `plan` counts are those of trainings."""

import json
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from both import configure_trainings
from children import run_ranks
from cpu_model import microbatches
from cpu_training import CpuOptions, CpuTraining
from rank_child import Job as TrainingOfRanks
from rank_child import Rank
from test_plan_by_hand import moves

import bridge_fgo
from bridge_fgo.config import OffloadConfig
from bridge_fgo.sleep.refusals import ddp_of
from bridge_fgo.tools.job.held import Held, OptimizerStates, Tensor
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.job.layout import buckets_of, held_of, states_of_leaves, temporary_bytes
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.plan.estimate import make_estimate, moving_bytes
from bridge_fgo.tools.plan.phases import ALONE, REST, SLEEP, SLEEP_ALL, WAKE_ALL, plan_phases
from bridge_fgo.tools.plan.state import sum_of
from bridge_fgo.tools.plan.systems import links

RAN_ON = "CPU"

pytestmark = pytest.mark.usefixtures("cpu_standins")

# --- states ---

OPTIONS = {
    "plain": {},
    "two chunks": {"chunks": 2},
    "experts": {"experts": True},
    "most parameters frozen": {"frozen": True},
    "fp16": {"precision": "fp16"},
    "native fp32 parameters": {"precision": "fp32_params"},
    "adam of whole parameters": {"optimizer": "adam", "precision": "fp32_params", "distributed": False},
    "muon of experts": {"optimizer": "muon", "experts": True, "distributed": False},
    "dist_muon": {"optimizer": "dist_muon", "frozen": True, "distributed": False},
    "Megatron-FSDP": {"fsdp": "optim_grads_params", "experts": True},
    "Megatron-FSDP, nothing sharded": {"fsdp": "no_shard"},
}


def planned(training, config):
    """Return the states of a training on one rank as an answer of the builder would have them."""
    answer = json.loads(json.dumps([asdict(states) for states in states_of_leaves(training.optimizer)]))
    held = [OptimizerStates(**states) for states in answer]
    return sum_of(((states.states(), states.divides) for states in held), config), held


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        *(pytest.param(options, {}, id=name) for name, options in OPTIONS.items()),
        *(({}, asked) for asked in ({"moments": False}, {"master_weights": False}, {"fraction": 0.5})),
    ],
)
def test_states_are_to_the_byte_what_the_engine_measures(options, asked):
    config = OffloadConfig(engine="native", **asked)
    with bridge_fgo.install(config), CpuTraining(CpuOptions(offload=True, **options)) as run:
        while run.step().skipped:  # fp16 begins with a loss scale that overflows
            pass
        run.step()
        stats = bridge_fgo.stats()
        plan, held = planned(run, config)
        homes = sum(sum(states.homes) for states in held)
        padding = homes - sum(numel * 4 for states in held if states.homes for _, numel, *_ in states.bundles)
        assert (plan.total, plan.offloaded) == (stats.state_bytes + padding, stats.offloaded_bytes + padding)
        if asked:
            assert 0 < plan.offloaded < plan.total
        else:
            assert plan.total == stats.released_bytes + padding > padding >= 0
        if options.get("precision") == "fp32_params":
            assert plan.masters < plan.moments // 2, "native fp32 parameters have no masters of their own"


# --- gradients ---


@pytest.mark.parametrize("options", [{}, {"chunks": 2}, {"experts": True}, {"frozen": True}], ids=str)
def test_buckets_and_what_moves_of_them_are_those_of_the_engine(options):
    config = OffloadConfig(gradients=True, engine="native")
    ddp = {"overlap_grad_reduce": True, "bucket_size": 20_000, "hidden": 64, "sequence": 16, "vocab": 64}
    with bridge_fgo.install(config), CpuTraining(CpuOptions(offload=True, **ddp, **options)) as run:
        run.step()
        gradients = vars(run.optimizer)["_bridge_fgo_session"].gradients
        wrapped = [chunk for each in run.model for chunk in ddp_of(each)]
        held = held_of(SimpleNamespace(), wrapped, [], [])
        assert (held.gradients, moving_bytes(held, config)) == (gradients.nbytes, gradients.moving_bytes)
        assert sorted(nbytes for _, nbytes in held.buckets) == sorted(bucket.nbytes for bucket in gradients.buckets)
        numbers = [last for last, _ in held.buckets]
        assert 0 <= min(numbers) <= max(numbers) <= sum(len([*chunk.parameters()]) for chunk in wrapped)
        assert Held(**vars(held)) == held


# --- sleeps ---

KINDS = ("plain", "two chunks", "experts", "most parameters frozen", "native fp32 parameters")


def planned_phases(training, limit=None):
    """Return the phases that are planned for a training on the CPU, with a limit of host memory in GiB."""
    chunks = [
        [
            Tensor(name, p.numel(), p.dtype, expert=not getattr(p, "allreduce", True), trainable=p.requires_grad)
            for name, p in chunk.named_parameters()
        ]
        for chunk in training.model
    ]
    cfg = training.cfg
    config = SimpleNamespace(optimizer=cfg.optimizer, ddp=cfg.ddp, train=cfg.train, model=cfg.model, dist=cfg.dist)
    optimizers = list(states_of_leaves(training.optimizer))
    held = held_of(cfg.model, training.model, optimizers, [[*range(len(optimizers))]])
    of_job = Job(config, Parallel(1, 1, 1, 1, 1, 1), [chunks], "test", held=[held])
    made = make_estimate(of_job, links=links("H200"), activations=10**9)
    (stage,) = plan_phases(made, limit).stages
    return stage


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planned_is_what_residency_copies_and_frees_and_keeps_under_a_limit(kind):
    def crossed(moved):
        return tuple((moved.copied_by_kind or {}).get(name, 0) for name in ("params", "grads", "optimizer"))

    with CpuTraining(CpuOptions(hidden=64, vocab=64, sequence=16, **OPTIONS[kind])) as training:
        stage, stayed = planned_phases(training), set()
        wanted = moves(stage)
        training.step()
        res = bridge_fgo.Residency(training.model, training.optimizer)
        first = res.offload()
        assert first.freed == stage.params + stage.grads + stage.optimizer
        assert crossed(first) == (stage.untold + stage.frozen, 0, stage.states)  # frozen ones this once
        assert crossed(res.reload()) == wanted[WAKE_ALL]
        training.step()
        assert crossed(res.offload()) == wanted[SLEEP_ALL]
        res.reload("params")
        res.reload()
        for _ in range(2):  # weights have come alone: from now on they are copied
            training.step()
            assert crossed(res.offload()) == wanted[SLEEP]
            assert crossed(res.reload("params")) == wanted[ALONE]
            assert crossed(res.reload()) == wanted[REST]
        res.close()
        for share in (0.001, 0.1, 0.3, 0.8, 1.01):
            limit = share * (stage.shard + stage.frozen + stage.states) / 2**30
            limited = planned_phases(training, limit)
            res = bridge_fgo.Residency(training.model, training.optimizer, host_memory_limit_gib=limit)
            assert res.offload().freed == limited.params + limited.grads + limited.optimizer
            assert res._memory.unhosted == limited.unhosted == limited.stays
            res.close()
            stayed.add(limited.unhosted)
        assert len(stayed) > 3 and min(stayed) == 0


# --- temporary buckets of Megatron-FSDP ---


class Meter:
    """Bytes of all buckets of Megatron-FSDP's allocators, now and at the most; of pools, from their first use on."""

    def __init__(self, set_attribute):
        from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as module

        self.dynamic, self.pools, self._memory, self.most = {}, {}, {}, 0
        for allocator in (module.TemporaryBucketAllocator, module.StorageResizeBasedBucketAllocator):
            set_attribute(allocator, "allocate", self._allocating(allocator.allocate))
            set_attribute(allocator, "free", self._freeing(allocator.free))
        set_attribute(module.get_global_memory_buffer(), "get_tensor", self._get_tensor)

    @property
    def now(self):
        return sum(self.dynamic.values()) + sum(self.pools.values())

    def _note(self):
        self.most = max(self.most, self.now)

    def _allocating(self, original):
        def allocate(allocator, bucket_id, size, dtype, *args, **kwargs):
            bucket = original(allocator, bucket_id, size, dtype, *args, **kwargs)
            self.dynamic[id(allocator), bucket_id] = bucket.data.untyped_storage().nbytes()
            self._note()
            return bucket

        return allocate

    def _freeing(self, original):
        def free(allocator, bucket_id):
            original(allocator, bucket_id)
            self.dynamic.pop((id(allocator), bucket_id), None)

        return free

    def _get_tensor(self, shape, dtype, name, mem_alloc_context=None):
        """Stand for GlobalMemoryBuffer's, which allocates on the current CUDA device."""
        (numel,) = shape
        if (name, dtype) not in self._memory or self._memory[name, dtype].numel() < numel:
            self._memory[name, dtype] = torch.empty(numel, dtype=dtype)
            self.pools[name, dtype] = self._memory[name, dtype].nbytes
            self._note()
        return self._memory[name, dtype][:numel]


def train_and_measure(rank, job: TrainingOfRanks, ddp: dict, model: dict):
    """Run as a rank of a training; return the bounds and the allocated bytes.

    ddp, model: settings of these sections that no option of the training has.
    """

    options, kept = CpuOptions(**job.changes), []
    configured = {
        f"{section}.{name}": value for section, of in (("ddp", ddp), ("model", model)) for name, value in of.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        configure_trainings(patch.setattr, configured)
        meter = Meter(setattr)
        with Rank(options, rank, job) as run:
            run._batches.iterable = microbatches(replace(options, seed=options.seed + rank))
            run.optimizer.optimizer.register_step_pre_hook(lambda *_: kept.append(meter.now))
            run.train(job.steps)
            cfg, parallel = run.cfg, Parallel(job.ranks, 1, 1, 1, 1, 1, options.instances)
            (chunk,) = run.model
            planned, in_step = temporary_bytes(list(buckets_of(chunk, cfg.ddp, parallel)), chunk.module, cfg.ddp)
            return {"planned": {"most": planned, "kept": in_step}, "found": {"most": meter.most, "kept": kept}}


WHOLE = {"fsdp": "optim_grads_params"}
DENSE_THEN_EXPERTS = {"moe_layer_freq": [0, 0, 1, 1, 1, 1]}
FP32 = {"megatron_fsdp_grad_comm_dtype": torch.float32}
DOUBLED = {"fsdp_double_buffer": True}
SMALL_BUCKETS = {"bucket_size": 100_000}
PERSISTENT = {"fsdp_db_use_persist_buf_on_alloc_fail": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def unit(elements):
    """Return the setting by which fewer elements than a model's are gathered ahead, or wait; a layer has 200,000."""
    return {"suggested_communication_unit_size": elements}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "changes", "ddp", "model"),
    [
        pytest.param(*case[1:], id=case[0])
        for case in [
            ("one rank", 1, WHOLE, {}, {}),
            ("no_shard", 2, {"fsdp": "no_shard"}, {}, {}),
            ("all wait", 2, WHOLE, {}, {}),
            ("none waits", 2, WHOLE | {"swiglu": True}, unit(1), {}),
            ("experts wait", 2, WHOLE | {"experts": True}, unit(200_000), DENSE_THEN_EXPERTS),
            ("frozen, recomputed", 2, WHOLE | {"frozen": True}, unit(400_000), RECOMPUTED),
            ("buckets", 2, {"fsdp": "optim_grads"}, SMALL_BUCKETS | unit(400_000), {}),
            ("double buffers of some", 2, WHOLE | {"experts": True}, DOUBLED, DENSE_THEN_EXPERTS),
            ("others persistent", 2, WHOLE | {"experts": True}, DOUBLED | PERSISTENT, DENSE_THEN_EXPERTS),
            ("gradients in fp32", 2, WHOLE | {"instances": 2, "microbatches": 4}, FP32 | unit(400_000), {}),
        ]
    ],
)
def test_no_training_has_more_bytes_of_buckets_than_the_bound(tmp_path, ranks, changes, ddp, model):
    job = TrainingOfRanks(tmp_path / "ranks", ranks, False, None, 2, {"layers": 6, **changes})
    for seen in run_ranks(partial(train_and_measure, ddp=ddp, model=model), job):
        planned, found = seen["planned"], seen["found"]
        assert found["most"] <= planned["most"] <= 3 * found["most"]
        assert all(kept <= planned["kept"] for kept in found["kept"])
