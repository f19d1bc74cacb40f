"""Gradients that have no memory before a backward, and leave between microbatches: bits, memory, order, faults."""

import dataclasses

import pytest
from both import OPTIMIZERS, PACKED, SMALL, as_resident, session_of, steps

import bridge_fgo

BUCKETS = SMALL | {"overlap_grad_reduce": True, "bucket_size": 20_000}
"""A model of several DDP buckets."""
LAZY = dataclasses.replace(PACKED, gradients="lazy")
OFF = dataclasses.replace(PACKED, gradients=True)
KINDS = {
    "one_microbatch": {"microbatches": 1},
    "three_microbatches": {"microbatches": 3},
    "chunks": {"chunks": 2, "microbatches": 3},
    "experts": {"experts": True, "microbatches": 3},
    "frozen": {"frozen": True},
    "fp16": {"precision": "fp16", "microbatches": 3},
    "fp32_norms": {"precision": "fp32_params", "microbatches": 3},
    "gathered_in_forward": {"overlap_param_gather": True, "microbatches": 3},
    "adam_not_distributed": {**OPTIMIZERS["adam"], "microbatches": 3},
    "muon": {**OPTIMIZERS["muon"], "microbatches": 3},
    "rerun": {"rerun_steps": frozenset({2}), "microbatches": 3},
    "skipped": {"found_inf_steps": frozenset({2}), "grad_norm_skip_steps": frozenset({3}), "microbatches": 3},
    "lengths": {"lengths": (32, 16, 24), "sequence": 32, "microbatches": 3},
}


@pytest.mark.parametrize("config", [LAZY, OFF], ids=["lazy", "off"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_bitwise_equal_to_resident(kind, config):
    with as_resident(4, config, **BUCKETS | KINDS[kind]) as run:
        steps(run, 4)
        moved = session_of(run).gradients.traffic
        is_off = config is OFF and run.options.microbatches > 1
        assert (moved.out > 0) is (moved.back > 0) is (is_off and kind != "frozen")


def test_each_microbatch_but_the_last_has_every_byte_that_moves_leave_and_return_as_the_figures_say():
    with as_resident(3, OFF, **BUCKETS | {"microbatches": 3}) as run:
        steps(run, 3)
        stats, gradients = bridge_fgo.stats(), session_of(run).gradients
        assert stats.gradient_bytes == gradients.nbytes >= gradients.moving_bytes > 0
        assert stats.gradient_bytes_offloaded == stats.gradient_bytes_reloaded == 2 * gradients.moving_bytes
        assert gradients.traffic.seconds > 0


def states_of(run):
    return [bucket.state for bucket in session_of(run).gradients.buckets]


def test_no_gradient_has_memory_before_the_first_backward_of_a_step():
    with as_resident(2, LAZY, **BUCKETS | {"microbatches": 1}) as run:
        seen = []
        run.forward = lambda: seen.append(set(states_of(run)))
        steps(run, 2)
