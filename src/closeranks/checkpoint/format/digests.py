"""The digests that detect damaged, moved or changed bytes of a state.

Three digests of each chunk: CRC32C (checked whenever it is read), BLAKE3 (identifies equal bytes), and its term of a
digest of the whole tensor that does not depend on how the tensor was split.

[Note: the layout-independent digest]
Let the whole tensor lie in row-major order in little-endian bytes, padded with zeros to whole words of four bytes. Then

    digest = sum of word[i] * MIX[i >> 16] * TABLE[i & 0xffff]  mod 2**64
    mix(x) = splitmix64's finaliser of x + 0x9e3779b97f4a7c15
    MIX[b] = mix(b) | 1
    TABLE[k] = mix(2**63 + k) with its low 17 bits replaced by 2 * k + 1

A piece's term is the same sum with all bytes outside the piece taken as zero; so the terms of any partition add up to
the digest. Words have four bytes and weights eight, since a high bit times a weight keeps only the weight's low bits:
with words of eight bytes, swapping x and -x would go undetected. Invariants: all weights are odd, so that one flipped
bit always changes the digest; two different words of one block of 65,536 have weights that differ in their low 17 bits,
so that swapping two different elements of up to four bytes there always changes it too. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any

import numpy as np
from blake3 import blake3
from crc32c import crc32c as _crc32c

from closeranks.core.pieces import Piece
from closeranks.core.reshard import TensorBox, contiguous_boxes
from closeranks.storage.protocol import Bytes

_ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
_WORD_BYTES = 4
_BLOCK = 1 << 16
"""Words that share one value of ``_mix``. A block, the table and the widened words fit a core's L2 cache."""
_LONG_BYTES = 8 << 10
"""From this size on a contiguous range is worth a call of its own; shorter ones are gathered."""
_MANY = 4
"""From this number of segments on, one call for all of them is worth it."""
_GATHERED = 1 << 16
"""Words gathered at once."""
_MASK = 2**64 - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

Array = np.ndarray[Any, np.dtype[Any]]


def item_bytes(dtype: str) -> int:
    """Size of one element; ``ValueError`` for a dtype that no checkpoint of this version uses."""
    try:
        return _ITEM_BYTES[dtype]
    except KeyError:
        raise ValueError(f"'{dtype}' is not a dtype that checkpoints support") from None


def crc32c(data: Bytes, value: int = 0) -> int:
    """``value``: the CRC of the preceding bytes. Runs without the GIL for more than a few KiB."""
    return int(_crc32c(data, value))


def blake3_hex(data: Bytes) -> str:
    return str(blake3(data).hexdigest())


def layout_independent_digest(data: Bytes, dtype: str, piece: Piece) -> int:
    """The term of ``data``, the piece's elements in the piece's own order, in the digest of the whole tensor."""
    size = item_bytes(dtype)
    if memoryview(data).nbytes != piece.numel * size:
        raise ValueError(f"{piece.name}: {memoryview(data).nbytes} bytes for {piece.numel} elements of {dtype}")
    if not piece.numel:
        return 0
    octets: Array = np.frombuffer(data, np.uint8)
    total = 0
    for contiguous in contiguous_boxes(piece):
        segments = _Segments(contiguous.box, piece.shape, size)
        begin = contiguous.first * size
        total += segments.digest(octets[begin : begin + contiguous.box.numel * size])
    return total & _MASK


class _Segments:
    """A box of a tensor as segments that are contiguous in the whole tensor's memory, all of the same length."""

    def __init__(self, box: TensorBox, shape: tuple[int, ...], item: int) -> None:
        strides = [item * prod(shape[dim + 1 :]) for dim in range(len(shape))]
        outer = len(shape)
        self.num_bytes = item
        while outer and self.num_bytes == strides[outer - 1]:
            outer -= 1
            self.num_bytes *= box.size[outer]
        self._size, self._strides = box.size[:outer], strides[:outer]
        self._first = sum(begin * stride for begin, stride in zip(box.start, strides, strict=True))
        self.count = prod(self._size)
        self._unit = min(item, _WORD_BYTES)

    def digest(self, octets: Array) -> int:
        if self.count == 1:
            return _stretch(octets, self._first)
        is_on_words = not any(number % _WORD_BYTES for number in (self.num_bytes, self._first, *self._strides))
        if is_on_words and self._size[-1] >= _MANY and self._strides[-1] * _MANY <= _BLOCK * _WORD_BYTES:
            return self._by_rows(octets)
        if self.num_bytes >= _LONG_BYTES:
            return self._by_stretches(octets)
        return self._gathered(octets)

    def _by_rows(self, octets: Array) -> int:
        """For equally spaced segments, many to a block."""
        stride = self._strides[-1] // _WORD_BYTES
        groups = octets.view("<u4").reshape(-1, self._size[-1], self.num_bytes // _WORD_BYTES)
        total = 0
        for first, places in self._places(_GATHERED, len(self._size) - 1):
            for number, place in enumerate(places.tolist(), first):
                total += _rows(groups[number], place // _WORD_BYTES, stride)
        return total

    def _by_stretches(self, octets: Array) -> int:
        total = 0
        for first, places in self._places(_GATHERED, len(self._size)):
            for number, place in enumerate(places.tolist(), first):
                total += _stretch(octets[number * self.num_bytes : (number + 1) * self.num_bytes], place)
        return total

    def _gathered(self, octets: Array) -> int:
        """For many short segments: every unit gets its own weight. A unit is an element, or a word of a larger one."""
        units = octets.view(f"<u{self._unit}").reshape(self.count, -1)
        within = np.arange(units.shape[1], dtype=np.int64) * self._unit
        total = 0
        for first, places in self._places(max(1, _GATHERED // units.shape[1]), len(self._size)):
            at = places[:, None] + within
            values = units[first : first + len(places)].astype(np.uint64)
            if self._unit < _WORD_BYTES:
                values <<= ((at & 3) << 3).astype(np.uint64)
            total += int(np.einsum("ij,ij->", values, _weights(at >> 2)))
        return total

    def _places(self, at_once: int, num_dims: int) -> Iterator[tuple[int, Array]]:
        """Byte offsets of the segments in the whole tensor, ``at_once`` at a time; with fewer outer dims, the offset of
        the first of each group of segments."""
        size, strides = self._size[:num_dims], self._strides[:num_dims]
        count = prod(size)
        for first in range(0, count, at_once):
            numbers = np.arange(first, min(first + at_once, count))
            places = np.full(len(numbers), self._first, dtype=np.int64)
            for indices, stride in zip(np.unravel_index(numbers, size) if size else (), strides, strict=True):
                places += indices * stride
            yield first, places


def _stretch(octets: Array, at: int) -> int:
    """Digest of bytes that are contiguous in the whole tensor's memory, from its byte ``at`` on."""
    head = min(-at % _WORD_BYTES, len(octets))
    num_words = (len(octets) - head) // _WORD_BYTES
    tail = head + num_words * _WORD_BYTES
    total = _part(octets[:head], at) + _part(octets[tail:], at + tail)
    words = octets[head:tail].view("<u4")
    table, scratch = _table(), np.empty(min(_BLOCK, num_words), np.uint64)
    word, done = (at + head) // _WORD_BYTES, 0
    while done < num_words:
        block, first = divmod(word + done, _BLOCK)
        count = min(_BLOCK - first, num_words - done)
        wide = scratch[:count]
        np.copyto(wide, words[done : done + count])
        total += (_mix(block) | 1) * int(np.einsum("i,i->", wide, table[first : first + count]))
        done += count
    return total


def _rows(words: Array, word: int, stride: int) -> int:
    """Digest of rows of words; the first row starts at word ``word`` of the whole tensor, each further one ``stride``
    words later. The weights of all rows in one block are a strided view of the table."""
    table, (num_rows, width) = _table(), words.shape
    total = row = 0
    while row < num_rows:
        block, first = divmod(word, _BLOCK)
        count = min((_BLOCK - width - first) // stride + 1, num_rows - row)
        if count < 1:  # the row crosses the boundary of two blocks
            count = 1
            total += _stretch(words[row].view(np.uint8), word * _WORD_BYTES)
        else:
            weights: Array = np.ndarray((count, width), np.uint64, table.data, first * 8, (stride * 8, 8))
            total += (_mix(block) | 1) * int(np.einsum("ij,ij->", words[row : row + count].astype(np.uint64), weights))
        row, word = row + count, word + count * stride
    return total


def _part(octets: Array, at: int) -> int:
    """Digest of less than a word."""
    if not len(octets):
        return 0
    block, first = divmod(at // _WORD_BYTES, _BLOCK)
    value = int.from_bytes(octets.tobytes(), "little") << 8 * (at % _WORD_BYTES)
    return value * (_mix(block) | 1) * int(_table()[first])


def _weights(words: Array) -> Array:
    blocks = words >> 16
    first = int(blocks.min())
    num_blocks = int(blocks.max()) - first + 1
    if num_blocks > words.size:  # far apart: one weight each
        mixes = np.array([_mix(block) | 1 for block in blocks.ravel().tolist()], np.uint64).reshape(words.shape)
    else:
        mixes = np.array([_mix(block) | 1 for block in range(first, first + num_blocks)], np.uint64)[blocks - first]
    weights: Array = mixes * _table()[words & (_BLOCK - 1)]
    return weights


def _mix(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


@cache
def _table() -> Array:
    low = np.arange(_BLOCK, dtype=np.uint64)
    x = low + np.uint64((2**63 + _GOLDEN) & _MASK)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    x ^= x >> np.uint64(31)
    table: Array = (x & np.uint64(_MASK ^ 0x1FFFF)) | (low * np.uint64(2) + np.uint64(1))
    return table
