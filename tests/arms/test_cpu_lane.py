"""The CPU lane itself, without the offload: what it claims to run is what runs, and twice the same."""

import json
import math
from datetime import timedelta

import pytest
import torch
from cpu_training import CpuOptions, CpuTraining

from bridge_fgo.tools.standins import cuda
from harness.arms.final_state import digest
from harness.arms.runner import EventWriter

KINDS = ("params", "masters", "moments")


pytestmark = pytest.mark.usefixtures("cpu_standins")


def run(steps, **options):
    """Train so many steps; return what they were, and the digests."""
    with CpuTraining(CpuOptions(**options)) as training:
        return training.train(steps), training.digests()


def test_the_model_learns_another_seed_is_another_training_and_each_kind_of_state_has_its_digest():
    losses = [step.loss for step in run(16)[0]]
    assert sum(losses[-4:]) < 0.92 * sum(losses[:4])
    digests = run(2)[1]
    assert digests != run(2, seed=1)[1]
    assert set(digests) == set(KINDS) and len(set(digests.values())) == len(KINDS)


@pytest.mark.parametrize("chunks", [1, 2])
def test_rerun_runs_two_passes_and_is_bitwise_equal_to_no_fault(chunks):
    (faulty, end), (plain, end_of_plain) = (run(4, chunks=chunks, rerun_steps=steps) for steps in ({3}, ()))
    assert [step.passes for step in faulty] == [1, 1, 2, 1]
    assert [(s.loss, s.grad_norm, s.skipped) for s in faulty] == [(s.loss, s.grad_norm, s.skipped) for s in plain]
    assert end == end_of_plain


def test_live_bytes_count_masters_and_moments_and_no_master_of_native_fp32_parameters():
    with CpuTraining(CpuOptions()) as training:
        parameters = sum(parameter.numel() for parameter in training.model[0].parameters())
        training.step()
        assert training.live_bytes == [4 * parameters] * training.options.microbatches
        training.step()
        assert training.live_bytes == [12 * parameters] * training.options.microbatches

    with CpuTraining(CpuOptions(precision="fp32_params")) as training:
        training.step()
        (distributed,) = training.optimizer.chained_optimizers
        fp32 = [parameter for group in distributed.model_fp32_groups for parameter in group]
        assert fp32 and all(parameter.dtype == torch.float32 for parameter in fp32)
        masters = 4 * sum(p.numel() for p in training.model[0].parameters() if p.dtype != torch.float32)
        moments = 8 * sum(p.numel() for p in training.model[0].parameters())
        assert training.live_state_bytes() == masters + moments


def test_released_state_is_not_read():
    with CpuTraining(CpuOptions()) as training:
        training.step()
        training.state_tensors()["moments"][0][1].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="released"):
            training.digests()


def test_standins_compute_nothing_have_one_thread_a_gloo_group_and_can_be_removed():
    from transformer_engine.pytorch import Linear

    with pytest.raises(RuntimeError, match="stand-in"):
        Linear(1, 1)
    with pytest.raises(ModuleNotFoundError):
        import transformer_engine.pytorch.optimizers  # noqa: F401
    patience = timedelta(seconds=7)
    for settings in ({"timeout": patience}, {"options": patience}):
        options = cuda.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1, **settings).options
        assert (options._threads, options._timeout) == (1, patience)

    stream = torch.cuda.Stream
    assert torch.ones(1, device="cuda").type() == "torch.cuda.FloatTensor"
    cuda.remove_standins()
    try:
        assert torch.cuda.Stream is not stream
        assert torch.ones(1).type() == "torch.FloatTensor"
    finally:
        cuda.install_standins()
    assert torch.cuda.Stream is stream


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int16])
def test_digest_sees_every_bit(dtype: torch.dtype):
    tensors = [torch.arange(6).to(dtype).view(2, 3), torch.zeros((), dtype=dtype)]
    before = digest(tensors)
    assert before == digest(dict(enumerate(tensors)))
    tensors[1].view(-1).view(torch.uint8)[0] ^= 1
    assert digest(tensors) != before


def test_numbers_that_json_lacks_are_kept_in_hex(tmp_path):
    writer = EventWriter(tmp_path / "events.jsonl")
    writer.step(step=1, loss=math.nan, grad_norm=None, skipped=True, passes=1, seconds=0.5)
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["loss"], event["loss_hex"]) == (None, "nan")
    assert (event["grad_norm"], event["grad_norm_hex"]) == (None, None)
    writer.close()


@torch.no_grad()
@pytest.mark.parametrize("dtype", cuda.HALVES)
def test_products_of_16_bit_matrices_are_added_up_in_fp32_and_rounded_once(dtype):
    left, right, added = torch.randn(8, 512).to(dtype), torch.randn(512, 8).to(dtype), torch.randn(8, 8).to(dtype)
    whole = left.float() @ right.float()
    assert torch.equal(left @ right, whole.to(dtype))
    assert torch.equal(torch.matmul(left, right), whole.to(dtype))
    assert torch.equal(torch.matmul(left, right, out=torch.empty(8, 8)), whole)  # fp32 gradients of mcore's layers
    scaled = torch.addmm(added.float(), left.float(), right.float(), beta=0.5, alpha=2.0)
    assert torch.equal(torch.addmm(added, left, right, beta=0.5, alpha=2.0), scaled.to(dtype))
    assert (torch.matmul(input=left, other=right).float() - whole).abs().max() < 1  # as PyTorch adds up
    with torch.enable_grad():
        assert type((left.requires_grad_() @ right).grad_fn).__name__ == "MmBackward0"
