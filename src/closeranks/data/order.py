"""Which sample stands at a position of the run, and which micro-batch does a rank take in a step?

The global order is a pure function of (seed, epoch, position): a keyed permutation of each epoch, computed on demand,
with no index in memory. Invariant: it knows nothing of ranks or of reading; the cursor of a run is one integer, and a
micro-batch has the same samples whoever takes it. Changing any constant below changes every run: the tests pin them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from closeranks.core.errors import DataError
from closeranks.core.keys import derive_seed

UInts: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.int64]

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def permute(index: npt.NDArray[Any], size: int, key: int) -> UInts:
    """The image of each index under a keyed permutation of ``range(size)``.

    A Feistel network permutes the next power of two; an image outside ``range(size)`` is permuted again until it falls
    inside (cycle walking, less than two rounds on average), which keeps the whole a bijection. About 0.1 s a million.
    """
    source = np.ascontiguousarray(index).reshape(-1).astype(np.uint64)
    if source.size and (size < 1 or int(source.max()) >= size):
        raise ValueError(f"an index to permute lies outside range({size})")
    bits = (size - 1).bit_length()
    keys = [_mix_integer(key + (number + 1) * _GOLDEN) for number in range(_ROUNDS)]
    image = _feistel(source, bits, keys)
    outside = np.flatnonzero(image >= size)
    while outside.size:
        image[outside] = _feistel(image[outside], bits, keys)
        outside = outside[image[outside] >= size]
    return image.reshape(np.shape(index))


def _feistel(values: UInts, bits: int, keys: list[int]) -> UInts:
    """A keyed permutation of ``range(2**bits)``; halves may differ by a bit, so they take turns, unswapped."""
    low_bits = np.uint64(bits - bits // 2)
    high_mask, low_mask = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << int(low_bits)) - 1)
    high, low = values >> low_bits, values & low_mask
    for number, key in enumerate(keys):
        if number % 2 == 0:
            high ^= _mix(low, key) & high_mask
        else:
            low ^= _mix(high, key) & low_mask
    return (high << low_bits) | low


def _mix(values: UInts, key: int) -> UInts:
    """The finaliser of splitmix64 over ``values ^ key``, in place after the first operation."""
    mixed = values ^ np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_MIX_1)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_MIX_2)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _mix_integer(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


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


class OrderWindow:
    """The same order, a few thousand positions at a time: one call of the permutation costs as much as a batch."""

    _SIZE = 4096

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples, self._seed = num_samples, seed
        self._first = 0
        self._indices = np.empty(0, dtype=np.int64)

    def indices(self, first: int, last: int) -> Ints:
        """The samples at positions ``[first, last)``."""
        if first < self._first or last > self._first + len(self._indices):
            self._first = first
            positions = np.arange(first, max(last, first + self._SIZE), dtype=np.int64)
            self._indices = sample_indices(positions, self._num_samples, self._seed)
        return self._indices[first - self._first : last - self._first]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward: its global identity (step, index) and its positions ``[first, last)``."""

    step: int
    index: int
    first: int
    last: int
    is_spare: bool = False
    """Worked off for the others' sake and counted nowhere: its loss weighs nothing."""

    @property
    def num_samples(self) -> int:
        return self.last - self.first

    def indices(self, num_samples: int, seed: int) -> Ints:
        """The samples of this micro-batch in a dataset of ``num_samples``."""
        return sample_indices(np.arange(self.first, self.last, dtype=np.int64), num_samples, seed)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the positions of a run fall into steps and micro-batches, and those to the data ranks.

    A step is ``global_batch`` positions, cut into micro-batches of ``micro_batch``; the last of a step may be short.
    Where ``total_samples`` ends the run, the last step is short, and a step beyond it is empty.
    """

    num_samples: int
    global_batch: int
    micro_batch: int
    num_steps: int
    total_samples: int | None = None

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError("the dataset is empty", "Give it at least one sample.")
        if min(self.global_batch, self.micro_batch) < 1 or self.num_steps < 0 or (self.total_samples or 0) < 0:
            raise ValueError(f"a schedule needs batches of at least one sample and no negative counts: {self}")

    @classmethod
    def for_steps(cls, num_samples: int, global_batch: int, micro_batch: int, steps: int) -> Schedule:
        """``steps`` full steps, over as many epochs as that takes."""
        return cls(num_samples, global_batch, micro_batch, steps)

    @classmethod
    def for_epochs(cls, num_samples: int, global_batch: int, micro_batch: int, epochs: float) -> Schedule:
        """Every sample ``epochs`` times (a fraction of an epoch rounds to samples); the last step may be short."""
        total = total_for_epochs(num_samples, epochs)
        return cls(num_samples, global_batch, micro_batch, steps_for(total, global_batch), total)

    def position(self, step: int) -> int:
        """The cursor before ``step``: how many positions the steps before it used up."""
        reached = step * self.global_batch
        return reached if self.total_samples is None else min(reached, self.total_samples)

    def num_micro_batches(self, step: int) -> int:
        return -(-(self.position(step + 1) - self.position(step)) // self.micro_batch)

    def micro_batches(self, step: int) -> tuple[MicroBatch, ...]:
        """All micro-batches of a step, in order."""
        return self._between(step, 0, self.num_micro_batches(step))

    def assigned(self, step: int, data_rank: int, data_size: int, *, even: bool = False) -> tuple[MicroBatch, ...]:
        """This rank's contiguous share of the step; where it does not come out even, the first ranks take one more.

        ``even``: the others repeat the step's last micro-batch as a spare, so that all ranks have the same number
        (where each forward is a collective, a rank that has one less would leave the others waiting).
        """
        if not 0 <= data_rank < data_size:
            raise ValueError(f"there is no data rank {data_rank} of {data_size}")
        share, extra = divmod(self.num_micro_batches(step), data_size)
        first = data_rank * share + min(data_rank, extra)
        own = self._between(step, first, first + share + (data_rank < extra))
        if not even or not extra or data_rank < extra:
            return own
        last = self.num_micro_batches(step) - 1
        return (*own, replace(self._between(step, last, last + 1)[0], is_spare=True))

    def _between(self, step: int, first: int, last: int) -> tuple[MicroBatch, ...]:
        """Micro-batches ``first`` to ``last`` of a step, without making the others: a step may hold thousands."""
        begin, end = self.position(step), self.position(step + 1)
        cuts = [min(begin + index * self.micro_batch, end) for index in range(first, last + 1)]
        return tuple(MicroBatch(step, first + n, cuts[n], cuts[n + 1]) for n in range(last - first))


def total_for_epochs(num_samples: int, epochs: float) -> int:
    """Samples that ``epochs`` passes see, at least one."""
    return max(1, round(num_samples * epochs))


def steps_for(total_samples: int, global_batch: int) -> int:
    """Steps that ``total_samples`` take, the last one short where they do not come out even."""
    return math.ceil(total_samples / global_batch)


def steps_for_epochs(num_samples: int, global_batch: int, epochs: float) -> int:
    """Steps that ``epochs`` passes over the samples take."""
    return steps_for(total_for_epochs(num_samples, epochs), global_batch)
