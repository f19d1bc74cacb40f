"""Precision-aware Adam with fp16 masters (the recipes of Nemotron 3 Super): each has an fp32 scale beside it."""

from __future__ import annotations

import fused_adam
import pytest
import torch
from comparing import assert_equal
from saving import load, save
from test_checkpoints import FORMATS, assert_same_shards
from test_construction import everything, trained, training

import bridge_fgo
from bridge_fgo.tools.arms.final_state import mcore_optimizers

pytestmark = pytest.mark.usefixtures("cpu_standins", "precision_aware_adam")

STEPS = 6
DTYPES = {
    "fp32 moments": {},
    "bf16 moments": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "fp16 moments": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
}
TROUBLE = {"rerun_steps": frozenset({2, 5}), "grad_norm_skip_steps": frozenset({4})}
PARTS = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20)


@pytest.fixture(scope="module")
def precision_aware_adam(cpu_standins):
    with pytest.MonkeyPatch.context() as patch:
        fused_adam.have_mcore_make_it_precision_aware(patch)
        yield


def fp16(dtypes):
    return {"store_param_remainders": False, "main_params_dtype": torch.float16, **DTYPES[dtypes]}


def all_of(run):
    """Every weight, state and scale of a training."""
    found = everything(run)
    for number, leaf in enumerate(mcore_optimizers(run.optimizer)):
        params = [param for group in leaf.optimizer.param_groups for param in group["params"]]
        for place, param in enumerate(params):
            for name, scale in leaf.optimizer._scales.get(param, {}).items():
                found[f"{number}.{place}.{name}.scale"] = scale.clone()
    return found


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("fp32 moments", "fp16 moments")]


@pytest.mark.parametrize("dtypes", ["bf16 moments", *SLOW])
def test_6_steps_with_fp16_masters_are_bitwise_equal_to_resident(dtypes):
    ends = {}
    for offload in (False, True):
        with training(offload, PARTS, precision_aware=fp16(dtypes), **TROUBLE) as run:
            numbers = []
            for _ in range(STEPS):
                numbers += trained(run, 1)
                assert not offload or max(run.live_bytes) == 0, "every state was off during forward"
            if offload:
                stats = bridge_fgo.stats()
                assert stats.released_bytes >= stats.state_bytes == stats.offloaded_bytes > 0
            ends[offload] = numbers, all_of(run)
    assert ends[True][0] == ends[False][0]
    assert_equal(ends[True][1], ends[False][1])
    end = ends[True][1]
    assert {end[name].dtype for name in end if name.endswith("master_param")} == {torch.float16}
    scales = [value.item() for name, value in end.items() if name.endswith("master_param.scale")]
    assert scales and 1.0 not in scales, "a scale that nobody needs would show nothing"


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_checkpoints_with_fp16_masters_have_a_resident_runs_bytes_and_are_resumed_bitwise(tmp_path, dtypes, kind):
    ends = {}
    for offload in (False, True):
        with training(offload, PARTS, precision_aware=fp16(dtypes)) as run:
            trained(run, 3)
            save(run, tmp_path / str(offload), kind)
            ends[offload] = trained(run, 2), all_of(run)
    assert ends[True][0] == ends[False][0]
    assert_equal(ends[True][1], ends[False][1])
    assert_same_shards(tmp_path / "True", tmp_path / "False")
    resumed = {}
    for offload in (False, True):
        with training(offload, PARTS, precision_aware=fp16(dtypes)) as run:
            load(run, tmp_path / str(offload))
            assert not offload or run.live_state_bytes() == 0
            for _ in range(3 * run.options.microbatches):  # the data goes on where the run was saved
                next(run._batches)
            run._batches.advance()
            resumed[offload] = trained(run, 2), all_of(run)
    assert resumed[True][0] == resumed[False][0]
    assert_equal(resumed[True][1], resumed[False][1])
