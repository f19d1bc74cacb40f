"""Which states go, which step in one go, and how they lie in slabs: arithmetic, checked on generated sizes."""

from types import SimpleNamespace

import pytest
import torch
from fake_optimizer import make_distributed_optimizer
from hypothesis import given
from hypothesis import strategies as st

from bridge_fgo.config import MIB, OffloadConfig
from bridge_fgo.memory.layout import ALIGNMENT, Codec, lay_out, offloaded_bundles, pack, part_bytes, pieces, select
from bridge_fgo.memory.remainders import Remainders
from bridge_fgo.memory.state_tensor import Bundle, Home, State
from bridge_fgo.states.distributed import bundles
from bridge_fgo.tools.plan.state import size_of

sizes = st.lists(st.integers(1, 5_000), max_size=60)
slab_sizes = st.integers(1, 8_000)


@given(sizes, slab_sizes)
def test_every_tensor_lies_in_one_slab_in_order_aligned_and_only_a_large_one_exceeds_its_size(nbytes, slab_bytes):
    layouts = pack(nbytes, slab_bytes)
    assert [m for layout in layouts for m in layout.members] == list(range(len(nbytes)))
    for layout in layouts:
        end = 0
        for member, offset in zip(layout.members, layout.offsets, strict=True):
            assert offset % ALIGNMENT == 0
            assert end <= offset < end + ALIGNMENT, "no overlap, and no gap"
            end = offset + nbytes[member]
        assert layout.nbytes == end
        assert layout.nbytes <= slab_bytes or len(layout.members) == 1


@given(st.integers(0, 100_000), st.integers(1, 9_000))
def test_pieces_cover_all_bytes_once(nbytes, piece_bytes):
    ranges = list(pieces(nbytes, piece_bytes))
    assert [start for start, _ in ranges] == [0, *[end for _, end in ranges]][: len(ranges)]
    assert all(0 < end - start <= piece_bytes for start, end in ranges)
    assert (ranges[-1][1] if ranges else 0) == nbytes


@given(st.lists(st.integers(0, 1_000), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_selection_reaches_the_share_and_not_a_bundle_more(nbytes, fraction):
    taken = select(nbytes, fraction)
    total = sum(nbytes[i] for i in taken)
    assert total >= fraction * sum(nbytes) - 1e-6
    if taken:
        assert total - nbytes[taken[-1]] < fraction * sum(nbytes)
    assert all(nbytes[i] > 0 for i in taken)


def test_fraction_one_takes_every_bundle_with_bytes_and_what_is_the_share_exactly_is_enough():
    assert select([3, 0, 5], 1.0) == [0, 2]
    assert select([5, 5], 0.5) == [0]


def master_of(param):
    return State("master", "master weight", param, torch.float32, lambda: param, written_back=True)


def moments_of(param, **how):
    names = ("exp_avg", "exp_avg_sq")
    return [State("moment", name, param, torch.float32, lambda: None, late=True, **how) for name in names]


@pytest.mark.parametrize(("mib", "expected"), [(1, 1), (32, 2), (800, 50), (3200, 160), (20_000, 400), (200_000, 1024)])
def test_a_part_is_the_mean_of_the_states_and_of_what_the_link_moves_meanwhile_and_at_most_a_slab(mib, expected):
    param = torch.empty(mib * MIB // 4, device="meta")
    assert part_bytes([Bundle(param, [master_of(param)])], OffloadConfig()) == expected * MIB


def test_every_state_asked_for_is_in_one_slab_and_only_masters_are_copied_to_the_model():
    everything = bundles(make_distributed_optimizer([1000, 300, 64, 7, 2000]))
    for asked in ({}, {"moments": False}, {"master_weights": False}, {"fraction": 0.3}):
        chosen = offloaded_bundles(everything, OffloadConfig(**asked))
        parts = lay_out(chosen, 8192, Remainders(torch.device("cpu")).codec_of)
        slabs = [slab for part in parts for slab in part.slabs]
        laid = [id(state) for slab in slabs for state in slab.states]
        assert sorted(laid) == sorted(id(state) for bundle in chosen for state in bundle.states)
        assert all((state.kind == "master") == slab.written_back for slab in slabs for state in slab.states)
        assert sum(slab.layout.nbytes for slab in slabs) >= sum(bundle.nbytes for bundle in chosen)
        assert [bundle for part in parts for bundle in part.bundles] == chosen


@given(limit=st.integers(0, 60_000), fraction=st.sampled_from([0.3, 1.0]))
def test_what_is_taken_fits_in_the_host_memory_that_is_given_and_what_is_left_out_does_not(limit, fraction):
    everything, config = bundles(make_distributed_optimizer([1000, 300, 64, 7, 2000])), OffloadConfig(fraction=fraction)
    chosen, asked = offloaded_bundles(everything, config, limit), offloaded_bundles(everything, config)
    taken = sum(slab.layout.nbytes for part in lay_out(chosen, 8192) for slab in part.slabs)
    left = [bundle for bundle in asked if id(bundle.param) not in {id(each.param) for each in chosen}]
    assert len(chosen) + len(left) == len(asked) and taken <= limit
    assert all(taken + bundle.nbytes + ALIGNMENT * 3 * len(asked) > limit for bundle in left)


@pytest.mark.parametrize(("mib", "sizes"), [(36, [36, 72]), (64, [64, 128]), (65, [65, 65, 65])])
def test_moments_of_a_large_tensor_are_one_slab_as_far_as_that_is_small(mib, sizes):
    param = torch.empty(mib * MIB // 4, device="meta")
    (part,) = lay_out([Bundle(param, [master_of(param), *moments_of(param)])], 4 * MIB)
    assert [slab.layout.nbytes for slab in part.slabs] == [size * MIB for size in sizes]


def test_what_a_part_holds_on_its_way():
    less = SimpleNamespace(link_bytes=2125, staging_bytes=2176)

    def codec_of(states, layout):
        return less if states[0].kind == "master" else Codec(layout.nbytes)

    (part,) = lay_out(bundles(make_distributed_optimizer([1000])), 2**20, codec_of)
    moments = 4096 + 4000
    size = size_of(part)
    assert (size.nbytes, size.transit_bytes, size.stays) == (4000 + moments, 4000 + moments + 2176, False)


def test_states_that_are_emptied_in_place_and_those_that_exist_later_lie_alone():
    # Others hold views of the former: they can neither be rebound nor share an allocation.
    param = torch.empty(1000)
    buffers = [State("buffer", name, param, torch.float32, lambda: param, home=Home(4000)) for name in "ab"]
    kept = [State("average", "average", param, torch.float32, lambda: param)]
    bundle = Bundle(param, [*moments_of(param), *buffers, *kept, master_of(param)])
    (part,) = lay_out([bundle], 2**20)
    names = [[state.name for state in slab.states] for slab in part.slabs]
    assert names == [["master weight"], ["a"], ["b"], ["average"], ["exp_avg", "exp_avg_sq"]]
    assert [slab.written_back for slab in part.slabs] == [True, False, False, False, False]
