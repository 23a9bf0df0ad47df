"""Measures how well an order is shuffled, compared with a true shuffle of all samples.

Each measure looks at one epoch and has a known value for a uniformly random permutation; ``numpy``'s own is shown as
the reference. They measure what training would notice: whether batches resemble each other, whether neighbours come
from the same place, whether the epoch as a whole drifts; and what shuffling costs: how many places a batch is read
from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from closeranks.data.sampling.order import BlockOrder, FullOrder, Ints, SampleOrder, SequentialOrder

_BINS = 16
_LABELS = 10


@dataclass(frozen=True, slots=True)
class ShuffleQuality:
    """Measures of one epoch. In brackets: the value for a random permutation."""

    drift: float
    """Rank correlation of a sample's place in the epoch with its place in the store. [0, plus or minus 1/sqrt(n)]"""
    displacement: float
    """How far samples move on average, relative to a random permutation. [1]"""
    neighbours: float
    """How far apart neighbours were stored on average, relative to a random permutation. [1]"""
    echo: float
    """Data stored sorted by label: correlation of a sample's label with the next one's. [0]"""
    makeup: float
    """Data stored sorted by a value: how much the mean of a batch varies, relative to random batches (variance). [1]"""
    evenness: float
    """Stored parts over parts of the epoch: chi-square per degree of freedom. [1]"""
    places: float
    """Stored blocks that a batch is read from, on average: the cost that locality reduces."""


def measure(epoch: Ints, *, batch: int, block: int) -> ShuffleQuality:
    """The quality of one epoch: ``epoch[i]`` is the sample at its position i, each from ``range(len(epoch))`` once."""
    size = len(epoch)
    if size < max(_BINS, 2 * batch):
        raise ValueError(f"an epoch of {size} samples is too short to judge batches of {batch}")
    places = np.arange(size)
    labels = epoch * _LABELS // size
    distance = size / 3.0
    return ShuffleQuality(
        drift=_correlation(places, epoch),
        displacement=float(np.abs(epoch - places).mean()) / distance,
        neighbours=float(np.abs(np.diff(epoch)).mean()) / distance,
        echo=_correlation(labels[:-1], labels[1:]),
        makeup=_makeup(epoch, batch),
        evenness=_evenness(epoch),
        places=_places(epoch, batch, block),
    )


def standard_orders(num_samples: int, seed: int, block: int, windows: Sequence[int]) -> Mapping[str, SampleOrder]:
    """The orders that a job can choose from."""
    blocks = {f"blocks, window {window}": BlockOrder(num_samples, seed, block, window) for window in windows}
    return {"full": FullOrder(num_samples, seed), **blocks, "none": SequentialOrder(num_samples)}


def compare(
    num_samples: int, *, seed: int = 0, batch: int = 256, block: int = 1024, windows: Sequence[int] = (1, 4, 16, 64)
) -> Mapping[str, ShuffleQuality]:
    """The first epoch of every order, and numpy's permutation of the same size."""
    epochs = {"numpy": np.random.default_rng(seed).permutation(num_samples).astype(np.int64)}
    for name, order in standard_orders(num_samples, seed, block, windows).items():
        epochs[name] = order.between(0, num_samples)
    return {name: measure(epoch, batch=batch, block=block) for name, epoch in epochs.items()}


def table(rows: Mapping[str, ShuffleQuality]) -> str:
    """One line per order, one column per measure."""
    names = [field.name for field in fields(ShuffleQuality)]
    width = max(len("order"), *(len(name) for name in rows))
    lines = ["  ".join([f"{'order':<{width}}", *(f"{name:>12}" for name in names)])]
    for name, quality in rows.items():
        lines.append("  ".join([f"{name:<{width}}", *(f"{getattr(quality, one):>12.4g}" for one in names)]))
    return "\n".join(lines)


def _correlation(first: Ints, second: Ints) -> float:
    return float(np.corrcoef(first, second)[0, 1])


def _makeup(epoch: Ints, batch: int) -> float:
    """A mean of ``b`` of ``n`` numbers drawn without replacement has the variance (n + 1)(n - b) / 12 b."""
    size = len(epoch)
    means = epoch[: size // batch * batch].reshape(-1, batch).mean(axis=1)
    expected = (size + 1) * (size - batch) / (12.0 * batch)
    return float(np.square(means - (size - 1) / 2.0).mean()) / expected


def _evenness(epoch: Ints) -> float:
    size = len(epoch)
    bins = np.arange(size) * _BINS // size
    counts = np.bincount(bins * _BINS + bins[epoch], minlength=_BINS * _BINS).reshape(_BINS, _BINS)
    expected = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / size
    return float((np.square(counts - expected) / expected).sum()) / (_BINS - 1) ** 2


def _places(epoch: Ints, batch: int, block: int) -> float:
    blocks = np.sort((epoch[: len(epoch) // batch * batch] // block).reshape(-1, batch), axis=1)
    return float((1 + (np.diff(blocks, axis=1) != 0).sum(axis=1)).mean())
