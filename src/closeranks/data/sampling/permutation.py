"""Shuffles a range of any size without an index in memory.

Uses a keyed permutation, computed number by number: ``permute`` gives the number at a place, ``unpermute`` the place of
a number. Invariant: for every size and key the two are bijections of the range, each the inverse of the other. Changing
any constant below changes every run: the tests pin them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from closeranks.core.counter_hash import GOLDEN, MIX_1, MIX_2, mix
from closeranks.core.seeds import derive_seed

UInts: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.int64]
Keys: TypeAlias = Sequence[UInts]
"""One key per round: without dims (the same for all numbers), or one for each number."""

_ROUNDS = 8
_MASK = (1 << 64) - 1


def permute(index: npt.NDArray[Any], size: int, key: int) -> UInts:
    """The image of each index under a keyed permutation of ``range(size)``.

    A Feistel network permutes the next power of two; an image outside ``range(size)`` is permuted again until it falls
    inside (cycle walking, less than two rounds on average), which keeps the whole a bijection. About 0.1 s a million.
    """
    source = _checked(index, size)
    return _walked(source, size, _round_keys(key)).reshape(np.shape(index))


def unpermute(image: npt.NDArray[Any], size: int, key: int) -> UInts:
    """The index that ``permute`` maps to each image: the same rounds in reverse, so the cycle walk is reversed as
    well."""
    source = _checked(image, size)
    return _walked(source, size, _round_keys(key), backwards=True).reshape(np.shape(image))


def permute_each(index: npt.NDArray[Any], size: int, keys: UInts) -> UInts:
    """``permute`` with a key for each index: many small ranges of one size in one call."""
    source = _checked(index, size)
    rounds = [mix(keys + np.uint64((number + 1) * GOLDEN & _MASK)) for number in range(_ROUNDS)]
    return _walked(source, size, rounds).reshape(np.shape(index))


def numbered_keys(key: int, numbers: npt.NDArray[Any]) -> UInts:
    """A key for each of the numbers."""
    return mix(mix(numbers.astype(np.uint64) * np.uint64(GOLDEN)) ^ np.uint64(key))


def sample_indices(positions: npt.NDArray[Any], num_samples: int, seed: int) -> Ints:
    """The samples at these positions of the run; each epoch of ``num_samples`` positions holds every sample once."""
    places = np.asarray(positions, dtype=np.int64)
    epochs = places // num_samples
    indices = np.empty_like(places)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        key = derive_seed(seed, "order", int(epoch))
        indices[here] = permute(places[here] - epoch * num_samples, num_samples, key).astype(np.int64)
    return indices


def _checked(index: npt.NDArray[Any], size: int) -> UInts:
    flat = np.ascontiguousarray(index).reshape(-1).astype(np.uint64)
    if flat.size and (size < 1 or int(flat.max()) >= size):
        raise ValueError(f"an index to permute lies outside range({size})")
    return flat


def _walked(values: UInts, size: int, keys: Keys, *, backwards: bool = False) -> UInts:
    """Through the network until every value is in ``range(size)`` again."""
    bits = (size - 1).bit_length()
    image = _feistel(values, bits, keys, backwards)
    outside = np.flatnonzero(image >= size)
    while outside.size:
        own = [key[outside] if key.ndim else key for key in keys]
        image[outside] = _feistel(image[outside], bits, own, backwards)
        outside = outside[image[outside] >= size]
    return image


def _feistel(values: UInts, bits: int, keys: Keys, backwards: bool) -> UInts:
    """A keyed permutation of ``range(2**bits)``; the halves may differ by a bit, so they alternate instead of being
    swapped."""
    low_bits = np.uint64(bits - bits // 2)
    high_mask, low_mask = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << int(low_bits)) - 1)
    high, low = values >> low_bits, values & low_mask
    for number in reversed(range(_ROUNDS)) if backwards else range(_ROUNDS):
        if number % 2 == 0:
            high ^= mix(low ^ keys[number]) & high_mask
        else:
            low ^= mix(high ^ keys[number]) & low_mask
    return (high << low_bits) | low


def _round_keys(key: int) -> list[UInts]:
    return [np.array(_mix_integer(key + (number + 1) * GOLDEN), dtype=np.uint64) for number in range(_ROUNDS)]


def _mix_integer(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)
