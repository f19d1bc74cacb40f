"""Claims about the planner: pure arithmetic, checked on generated sizes."""

from hypothesis import given
from hypothesis import strategies as st

from bridge_fgo.engine.plan import ALIGNMENT, pack, pieces, select

sizes = st.lists(st.integers(1, 5_000), max_size=60)


@given(sizes, st.integers(1, 8_000))
def test_every_tensor_lies_in_exactly_one_slab_in_order(nbytes, slab_bytes):
    members = [m for layout in pack(nbytes, slab_bytes) for m in layout.members]
    assert members == list(range(len(nbytes)))


@given(sizes, st.integers(1, 8_000))
def test_tensors_of_a_slab_are_aligned_and_do_not_overlap(nbytes, slab_bytes):
    for layout in pack(nbytes, slab_bytes):
        end = 0
        for member, offset in zip(layout.members, layout.offsets, strict=True):
            assert offset % ALIGNMENT == 0
            assert end <= offset < end + ALIGNMENT
            end = offset + nbytes[member]
        assert layout.nbytes == end


@given(sizes, st.integers(1, 8_000))
def test_a_slab_exceeds_its_size_only_for_one_large_tensor(nbytes, slab_bytes):
    for layout in pack(nbytes, slab_bytes):
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


def test_fraction_one_takes_every_bundle_with_bytes():
    assert select([3, 0, 5], 1.0) == [0, 2]
