"""The global sample order: maps positions of the run to samples.

The order is a pure function of (seed, epoch, position), computed on demand without an index in memory: any position
costs the same, so a run resumes anywhere. Invariant: it does not depend on ranks, micro-batches or reading, and in
every epoch of ``num_samples`` positions each sample occurs exactly once. Mixtures (``mixture_order``) guarantee that
for each part separately.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from closeranks.core.errors import DataError
from closeranks.core.seeds import derive_seed
from closeranks.data.sampling.batch_schedule import BatchSchedule, MicroBatch
from closeranks.data.sampling.permutation import Ints, numbered_keys, permute, permute_each, sample_indices, unpermute

__all__ = [
    "BatchSchedule",
    "BlockOrder",
    "FullOrder",
    "Ints",
    "MicroBatch",
    "SampleOrder",
    "SequentialOrder",
    "permute",
]


class SampleOrder(ABC):
    """Maps positions of a run to samples. A value: equal orders give equal samples."""

    __slots__ = ()
    num_samples: int
    """Positions per epoch."""

    @abstractmethod
    def at(self, positions: Ints) -> Ints:
        """The samples at these positions, which may be any, in any order."""

    def between(self, first: int, last: int) -> Ints:
        """The samples at positions ``[first, last)``."""
        return self.at(np.arange(first, last, dtype=np.int64))

    @property
    def signature(self) -> str:
        """What must be unchanged when a run resumes; empty for the default order, which seed and size describe."""
        return repr(self)


@dataclass(frozen=True, slots=True)
class FullOrder(SampleOrder):
    """A new permutation of all samples in each epoch: any sample may come next to any other."""

    num_samples: int
    seed: int

    def __post_init__(self) -> None:
        _refuse_empty(self.num_samples)

    def at(self, positions: Ints) -> Ints:
        return sample_indices(positions, self.num_samples, self.seed)

    @property
    def signature(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class SequentialOrder(SampleOrder):
    """In the order in which they are stored, repeatedly."""

    num_samples: int

    def __post_init__(self) -> None:
        _refuse_empty(self.num_samples)

    def at(self, positions: Ints) -> Ints:
        return np.asarray(positions, dtype=np.int64) % self.num_samples


@dataclass(frozen=True, slots=True)
class BlockOrder(SampleOrder):
    """Keeps neighbours close: blocks of ``block`` samples are shuffled, then the samples within each ``window`` blocks.

    An epoch arranges the blocks in a keyed order, one after the other; from ``window`` of them at a time it takes all
    samples in a keyed order before it moves on. So a run of positions inside a window touches ``window`` blocks, and
    one across its end those of two windows.
    """

    num_samples: int
    seed: int
    block: int
    window: int

    def __post_init__(self) -> None:
        _refuse_empty(self.num_samples)
        if min(self.block, self.window) < 1:
            raise ValueError(f"blocks and windows hold at least one: {self}")

    def at(self, positions: Ints) -> Ints:
        places = np.asarray(positions, dtype=np.int64)
        epochs = places // self.num_samples
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            laid = _laid(self, int(epoch))
            indices[here] = laid.samples(laid.mixed(places[here] - epoch * self.num_samples))
        return indices


@dataclass(frozen=True, slots=True)
class _Laid:
    """The blocks of one epoch, one after the other in a keyed order.

    [Note: the short block] The last block may be short, and it may be at any position. If it were padded to full
    length, every block would begin at a multiple of ``block`` and every window at a multiple of ``window * block``;
    those are the *full* places. Places behind the short block are ``missing`` less than their full ones.
    """

    order: BlockOrder
    num_blocks: int
    missing: int
    """Samples that the last block lacks."""
    short_slot: int
    """The position of the last block among the shuffled blocks."""
    block_key: int
    window_key: int

    def mixed(self, places: Ints) -> Ints:
        """Shuffles within windows: for each place of the epoch, the place among the arranged blocks from which it takes
        its sample."""
        length = self.order.block * self.order.window
        windows = self._filled(places) // length
        first, end = self._begins(windows * length), self._begins((windows + 1) * length)
        keys = numbered_keys(self.window_key, windows)
        taken = np.empty_like(places)
        for size in np.unique(end - first):  # at most three sizes: full, with the short block, at the end
            here = end - first == size
            taken[here] = permute_each((places - first)[here], int(size), keys[here]).astype(np.int64)
        return first + taken

    def samples(self, places: Ints) -> Ints:
        """The samples at these places among the arranged blocks."""
        slots, offsets = np.divmod(self._filled(places), self.order.block)
        blocks = permute(slots, self.num_blocks, self.block_key).astype(np.int64)
        return blocks * self.order.block + offsets

    def _filled(self, places: Ints) -> Ints:
        short_end = (self.short_slot + 1) * self.order.block - self.missing
        return places + self.missing * (places >= short_end)

    def _begins(self, filled: Ints) -> Ints:
        """The actual place of a block's first sample, given its full place; the end of the epoch for any beyond it."""
        behind = filled > self.short_slot * self.order.block
        return np.minimum(filled - self.missing * behind, self.order.num_samples)


@lru_cache(maxsize=64)
def _laid(order: BlockOrder, epoch: int) -> _Laid:
    num_blocks = -(-order.num_samples // order.block)
    block_key = derive_seed(order.seed, "blocks", epoch)
    return _Laid(
        order,
        num_blocks,
        missing=num_blocks * order.block - order.num_samples,
        short_slot=int(unpermute(np.array([num_blocks - 1]), num_blocks, block_key)[0]),
        block_key=block_key,
        window_key=derive_seed(order.seed, "windows", epoch),
    )


def _refuse_empty(num_samples: int) -> None:
    if num_samples < 1:
        raise DataError("the dataset is empty", "Give it at least one sample.")
