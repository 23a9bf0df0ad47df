from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.capture import chunk_ranges
from closeranks.capture.chunk_ranges import CHUNK_BYTES, WHOLE_BYTES, ChunkRange, HeldPiece, own_chunk_ranges
from closeranks.core.pieces import Piece
from closeranks.core.reshard import contiguous_boxes, plan_copies

MIB = 1 << 20


def held(piece: Piece, item_bytes: int, num_holders: int) -> list[tuple[ChunkRange, ...]]:
    """What each holder writes."""
    return [
        own_chunk_ranges(HeldPiece("model", piece, item_bytes, holder, num_holders)) for holder in range(num_holders)
    ]


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    """A box of a tensor, or a flat range of one; often large enough to be cut many times."""
    shape = tuple(draw(st.lists(st.integers(1, 3000), min_size=0, max_size=3)))
    bounds = [sorted(draw(st.tuples(st.integers(0, extent), st.integers(0, extent)))) for extent in shape]
    name = draw(st.text(max_size=5))
    box = Piece(name, shape, tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))
    if draw(st.booleans()):
        first, last = sorted(draw(st.tuples(*[st.integers(0, prod(box.size))] * 2)))
        return box.flattened(first, last)
    return box


@given(pieces(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 9))
def test_all_holders_together_write_each_element_once(piece: Piece, item_bytes: int, num_holders: int) -> None:
    ranges = sorted((share.first, share.last) for parts in held(piece, item_bytes, num_holders) for share in parts)
    ends = [0, *(last for _, last in ranges)]
    assert [first for first, _ in ranges] == ends[:-1]
    assert ends[-1] == piece.numel
    assert all((last - first) * item_bytes <= CHUNK_BYTES for first, last in ranges)


@given(pieces(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 9))
def test_a_share_says_which_part_of_the_tensor_it_is(piece: Piece, item_bytes: int, num_holders: int) -> None:
    """Its memory is that range of the piece's: box by box, what both say about each element agrees."""
    for share in (share for parts in held(piece, item_bytes, num_holders) for share in parts):
        assert share.piece.numel == share.last - share.first
        found = plan_copies(share.piece, [piece])
        assert not found.missing
        for overlap in found.overlaps:
            inside = overlap.box.numel == overlap.source.box.numel == overlap.target.box.numel
            if inside:
                assert overlap.source.first == share.first + overlap.target.first
        assert sum(run.box.numel for run in contiguous_boxes(share.piece)) == share.piece.numel


@given(pieces(), st.integers(1, 9))
def test_small_pieces_stay_whole(piece: Piece, num_holders: int) -> None:
    if 0 < piece.numel < WHOLE_BYTES:
        written = [share for parts in held(piece, 1, num_holders) for share in parts]
        assert written == [ChunkRange(0, piece.numel, piece)]


@pytest.mark.parametrize("num_holders", [2, 3, 8])
def test_a_large_piece_weighs_the_same_on_all_its_holders(num_holders: int) -> None:
    loads = [
        sum(share.last - share.first for share in parts)
        for parts in held(Piece.whole("w", (1000, 3001, 7)), 4, num_holders)
    ]
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("num_holders", [2, 8, 64])
def test_the_state_of_a_model_is_balanced_within_a_chunk(num_holders: int) -> None:
    """Thirty blocks of a Llama: matrices of 8 to 32 MiB, norms of 16 KiB, and what AdamW remembers of each."""
    shapes = {"wq": (2048, 2048), "wk": (512, 2048), "up": (4096, 2048), "norm": (4096,), "scale": (1, 300, 300)}
    loads = [0] * num_holders
    for key in (f"layers.{n}.{name}{kind}" for n in range(30) for name in shapes for kind in ("", "/exp_avg", "/sq")):
        shape = next(shape for name, shape in shapes.items() if f".{name}" in key)
        for holder, parts in enumerate(held(Piece.whole(key, shape), 4, num_holders)):
            loads[holder] += sum(4 * (share.last - share.first) for share in parts)
    assert max(loads) - min(loads) <= CHUNK_BYTES
    assert min(loads) > 0


def test_an_empty_tensor_is_written_once_and_an_empty_piece_never() -> None:
    empty = Piece.whole("nothing", (0, 4))
    assert sorted(map(len, held(empty, 4, 3))) == [0, 0, 1]
    assert held(Piece.whole("w", (3,)).shard(0, 3, 4), 4, 2) == [(), ()]
    scalar = Piece.whole("step", ())
    assert [share for parts in held(scalar, 4, 2) for share in parts] == [ChunkRange(0, 1, scalar)]


def test_a_range_of_a_flat_piece_lies_in_the_same_box() -> None:
    flat = Piece.whole("w", (64, MIB)).narrow(0, 8, 64).flattened(5, 5 + 20 * MIB)
    parts = [share for parts in held(flat, 4, 1) for share in parts]
    assert [share.piece.flat for share in parts] == [
        (5, 5 + 8 * MIB),
        (5 + 8 * MIB, 5 + 16 * MIB),
        (5 + 16 * MIB, 5 + 20 * MIB),
    ]
    assert {(share.piece.start, share.piece.size) for share in parts} == {((8, 0), (56, MIB))}


def test_who_comes_first_is_the_same_in_every_process() -> None:
    """A golden draw: ``hash`` of a text, which differs between processes, would not keep it."""
    drawn = [chunk_ranges._first_holder(HeldPiece("model", Piece.whole(name, (3,)), 4, 0, 1000)) for name in ("a", "b")]
    assert drawn == [
        chunk_ranges._first_holder(HeldPiece("model", Piece.whole(name, (3,)), 4, 7, 1000)) for name in ("a", "b")
    ]
    assert drawn == [849, 314]
