"""Shares add up whatever the cut, and nothing that happens to a byte goes unseen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.checkpoint.format import digests
from closeranks.checkpoint.format.digests import blake3_hex, crc32c, layout_independent_digest
from closeranks.core.pieces import Piece
from tests.checkpoint.cutting import cuts, shapes
from tests.checkpoint.making import filled, held

DTYPES = ["bool", "float8_e4m3fn", "int16", "bfloat16", "float32", "int64", "complex64", "complex128"]
MASK = 2**64 - 1


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def weight(word: int) -> int:
    block, k = word >> 16, word & 0xFFFF
    return (mix(block) | 1) * (mix(2**63 + k) & ~0x1FFFF | (2 * k + 1)) & MASK


def by_the_book(data: bytes) -> int:
    """The definition in docs/checkpoint-format.md, word by word."""
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    return sum(word * weight(number) for number, word in enumerate(words)) & MASK


@given(st.data(), shapes(), st.sampled_from(DTYPES), st.integers(0, 99))
def test_the_shares_of_every_cut_add_up_to_the_digest_of_the_whole(
    data: st.DataObject, shape: tuple[int, ...], dtype: str, seed: int
) -> None:
    whole = filled(shape, dtype, seed)
    shares = [layout_independent_digest(held(whole, piece), dtype, piece) for piece in data.draw(cuts(shape))]
    assert sum(shares) % 2**64 == by_the_book(whole.tobytes())


WIDE = [
    ("float32", (300, 700), 1, 2),  # rows at equal distances, some across the border of two blocks
    ("bfloat16", (300, 1402), 1, 2),  # the same with borders within words
    ("bfloat16", (301, 1403), 1, 3),
    ("uint8", (40, 20_011), 1, 2),  # long rows that begin within words
    ("int64", (2, 70_000), 1, 350),  # short ones, far apart
    ("complex128", (3, 40, 300), 1, 3),
    ("float32", (6, 11, 3, 1000), 1, 4),
    ("float32", (2, 3, 200, 100), 3, 7),
]


@pytest.mark.parametrize(("dtype", "shape", "dim", "parts"), WIDE)
def test_large_tensors_cut_along_an_inner_dim(dtype: str, shape: tuple[int, ...], dim: int, parts: int) -> None:
    whole = filled(shape, dtype, 7)
    uncut = Piece.whole("x", shape)
    pieces = [uncut.shard(dim, index, parts) for index in range(parts)]
    flat = [part for box in pieces[:3] for part in (box.flattened(0, 99), box.flattened(99, box.numel))]
    digest = layout_independent_digest(whole.tobytes(), dtype, uncut)
    assert digest == by_the_book(whole.tobytes())
    for cut in (pieces, flat + pieces[3:]):
        assert sum(layout_independent_digest(held(whole, piece), dtype, piece) for piece in cut) % 2**64 == digest


@given(st.data(), shapes(), st.sampled_from(DTYPES), st.integers(0, 99))
def test_one_flipped_bit_changes_all_three(data: st.DataObject, shape: tuple[int, ...], dtype: str, seed: int) -> None:
    whole, piece = filled(shape, dtype, seed).tobytes(), Piece.whole("x", shape)
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    assert layout_independent_digest(flipped, dtype, piece) != layout_independent_digest(whole, dtype, piece)
    assert crc32c(flipped) != crc32c(whole)
    assert blake3_hex(flipped) != blake3_hex(whole)


@given(st.data(), st.integers(2, 300), st.sampled_from(DTYPES), st.integers(0, 99))
def test_two_swapped_elements_change_it(data: st.DataObject, numel: int, dtype: str, seed: int) -> None:
    one, other = data.draw(st.lists(st.integers(0, numel - 1), min_size=2, max_size=2, unique=True))
    whole = filled((numel,), dtype, seed)
    swapped = whole.copy()
    swapped[[one, other]] = whole[[other, one]]
    piece = Piece.whole("x", (numel,))
    same = layout_independent_digest(swapped.tobytes(), dtype, piece) == layout_independent_digest(
        whole.tobytes(), dtype, piece
    )
    assert same == (whole[one].tobytes() == whole[other].tobytes())


@given(st.lists(st.integers(0, 199_999), min_size=2, max_size=2, unique=True), st.sampled_from([2.0, 0.0, 1e30]))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_number_swapped_with_its_negative_changes_it(dtype: str, places: list[int], number: float) -> None:
    whole, piece = np.ones(200_000, dtype), Piece.whole("x", (200_000,))
    whole[places] = number, -number
    digest = layout_independent_digest(whole.data, dtype, piece)
    whole[places] = -number, number
    assert layout_independent_digest(whole.data, dtype, piece) != digest


def test_memory_of_any_kind_and_alignment_gives_the_same() -> None:
    whole, piece = filled((777,), "int64", 3).tobytes(), Piece.whole("x", (777,))
    shifted = memoryview(b"???" + whole)[3:]
    assert layout_independent_digest(shifted, "int64", piece) == layout_independent_digest(
        bytearray(whole), "int64", piece
    )
    assert layout_independent_digest(shifted, "int64", piece) == by_the_book(whole)


def test_a_number_and_nothing() -> None:
    assert layout_independent_digest(b"\x01\x00\x00\x00", "float32", Piece.whole("x", ())) == weight(0)
    assert layout_independent_digest(b"", "float32", Piece.whole("x", (3, 0, 5))) == 0
    assert layout_independent_digest(b"", "float32", Piece.whole("x", (3, 5)).flattened(4, 4)) == 0


def test_bytes_that_do_not_fit_the_piece_and_unknown_types_are_refused() -> None:
    with pytest.raises(ValueError, match="11 bytes for 3 elements of float32"):
        layout_independent_digest(bytes(11), "float32", Piece.whole("x", (3,)))
    with pytest.raises(ValueError, match="'quint8' is not a dtype"):
        layout_independent_digest(bytes(3), "quint8", Piece.whole("x", (3,)))


def test_weights_are_odd_and_apart_in_their_low_bits() -> None:
    table = digests._table()
    assert bool(np.all(table & np.uint64(1)))
    assert len(np.unique(table & np.uint64(0x1FFFF))) == len(table) == 65_536


def test_the_standard_check_values() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"6789", crc32c(b"12345")) == 0xE3069283
    assert blake3_hex(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
