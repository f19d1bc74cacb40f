"""The parts of an optimizer before they have memory."""

from types import SimpleNamespace

import pytest
import torch
from fake_optimizer import make_distributed_optimizer

from bridge_fgo.config import MIB, OffloadConfig
from bridge_fgo.engine.part_layout import lay_out, offloaded_bundles, part_bytes
from bridge_fgo.engine.remainders import MasterRemainders
from bridge_fgo.engine.states import Bundle, StateRef, bundles


@pytest.mark.parametrize(("mib", "expected"), [(1, 1), (32, 2), (800, 50), (3200, 160), (20_000, 400), (200_000, 1024)])
def test_a_part_is_the_mean_of_the_states_and_of_what_the_link_moves_meanwhile_and_at_most_a_slab(mib, expected):
    param = torch.empty(mib * MIB // 4, device="meta")
    bundle = Bundle(param, [StateRef("master", param, None, torch.optim.AdamW([param]), torch.float32)])
    assert part_bytes([bundle], OffloadConfig()) == expected * MIB


def test_every_state_asked_for_is_in_one_slab_and_only_masters_are_copied_to_the_model():
    everything = bundles(make_distributed_optimizer([1000, 300, 64, 7, 2000]))
    for asked in ({}, {"moments": False}, {"master_weights": False}, {"fraction": 0.3}):
        chosen = offloaded_bundles(everything, OffloadConfig(**asked))
        parts = lay_out(chosen, 8192, MasterRemainders({}, torch.device("cpu")))
        slabs = [slab for part in parts for slab in part.slabs]
        laid = [id(ref) for slab in slabs for ref in slab.refs]
        assert sorted(laid) == sorted(id(ref) for bundle in chosen for ref in bundle.refs)
        assert all((ref.kind == "master") == slab.is_copied_to_model for slab in slabs for ref in slab.refs)
        assert sum(part.nbytes for part in parts) >= sum(bundle.nbytes for bundle in chosen)
        assert [bundle for part in parts for bundle in part.bundles] == chosen


@pytest.mark.parametrize(("mib", "sizes"), [(36, [36, 72]), (64, [64, 128]), (65, [65, 65, 65])])
def test_moments_of_a_large_tensor_are_one_slab_as_far_as_that_is_small(mib, sizes):
    param = torch.empty(mib * MIB // 4, device="meta")
    adam = torch.optim.AdamW([param])
    refs = [StateRef("moment", param, key, adam, torch.float32) for key in ("exp_avg", "exp_avg_sq")]
    bundle = Bundle(param, [StateRef("master", param, None, adam, torch.float32), *refs])
    (part,) = lay_out([bundle], 4 * MIB, MasterRemainders({}, torch.device("meta")))
    assert [slab.layout.nbytes for slab in part.slabs] == [size * MIB for size in sizes]


def test_what_a_part_holds_on_its_way_copies_and_gives_the_model():
    less = SimpleNamespace(nbytes=2125)
    of_masters = SimpleNamespace(of_slab=lambda refs, *where: less if refs[0].kind == "master" else None)
    (part,) = lay_out(bundles(make_distributed_optimizer([1000])), 2**20, of_masters)
    moments = 4096 + 4000
    assert (part.nbytes, part.transit_bytes) == (4000 + moments, 4000 + moments + 2125)
    assert (part.copied_bytes, part.copied_to_model) == (2125 + moments, 4000)
