"""A synthetic click log whose best reachable AUC is known: dense values, ids with Zipf frequencies, and a click.

[Note: the click log] Sample n is drawn from words w(n, j) = hash(key, n, j) (``core.counter_hash``):

- dense[j] is uniform with mean 0 and variance 1.
- Feature f has 1 to ``max_ids`` ids. The probability of an id falls as (id + 1)^-zipf: with u uniform,
  id = floor(x) - 1, where x = (1 + u ((rows + 1)^(1 - zipf) - 1))^(1 / (1 - zipf)).
- Every id has an effect e and a vector v of two values, hashes of (feature, id), uniform with mean 0 and variance
  1; those of a bag are added up and divided by the root of its length: E[f], V[f].
- logit = bias + signal (0.40 a . dense / |a| + 0.85 sum_f E[f] / sqrt(features)
                         + 0.34 sum_f V[f] . V[f + 1] / sqrt(2 features)), with fixed weights a; f + 1 wraps around.
- click = 1 with probability 1 / (1 + exp(-logit)).

The batch carries that probability: a model that knew it would rank best, and evaluations report the AUC it has on the
same samples. Invariant: a sample is a pure function of its index and of the sizes; nothing is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from closeranks.core.counter_hash import Floats, Words, uniform, words
from closeranks.core.protocols import Batch
from closeranks.core.seeds import derive_seed
from closeranks.data.config import ClicksDataConfig
from closeranks.data.sampling.order import Ints
from closeranks.data.sources.registry import SOURCES, Split, num_held_out

_VECTOR = 2
_ROOT_3 = 3.0**0.5
_OF_DENSE, _OF_IDS, _OF_PAIRS = 0.4, 0.85, 0.34
_NO_ID = -1
"""Fills the bags that are shorter than the longest."""


@dataclass(frozen=True, slots=True)
class ClickLog:
    """The distribution: [Note: the click log]."""

    num_dense: int
    features: int
    rows: int
    max_ids: int
    zipf: float
    signal: float
    bias: float
    seed: int

    def draw(self, samples: Ints) -> tuple[Floats, Ints, Floats, Floats]:
        """Dense values [n, num_dense], ids [n, features, max_ids], click and its probability [n]."""
        key = derive_seed(self.seed, "clicks", "samples")
        num_ids = self.features * self.max_ids
        drawn = uniform(words(key, samples[:, None], np.arange(self.num_dense + num_ids + self.features + 1)))
        dense, ranks, lengths, chance = np.split(drawn, np.cumsum([self.num_dense, num_ids, self.features]), axis=1)
        dense = _centred(dense)
        ids = self._ids(ranks.reshape(len(samples), self.features, self.max_ids))
        length = 1 + np.floor(lengths * self.max_ids).astype(np.int64)
        ids[np.arange(self.max_ids) >= length[:, :, None]] = _NO_ID
        probability = 1.0 / (1.0 + np.exp(-self.logit(dense, ids)))
        return dense, ids, (chance[:, 0] < probability).astype(np.float64), probability

    def logit(self, dense: Floats, ids: Ints) -> Floats:
        weights = _centred(uniform(words(derive_seed(self.seed, "clicks", "dense"), np.arange(self.num_dense))))
        of_dense = (dense * weights).sum(axis=1) / np.sqrt(np.square(weights).sum())
        there = (ids != _NO_ID)[..., None]
        effects = np.where(there, _centred(uniform(self._id_words(ids))), 0.0).sum(axis=2)
        effects /= np.sqrt(there.sum(axis=2))
        first, vectors = effects[..., 0], effects[..., 1:]
        products = (vectors * np.roll(vectors, -1, axis=1)).sum(axis=2) / np.sqrt(_VECTOR)
        spread = np.sqrt(self.features)
        of_ids, of_pairs = first.sum(axis=1) / spread, products.sum(axis=1) / spread
        total: Floats = self.bias + self.signal * (_OF_DENSE * of_dense + _OF_IDS * of_ids + _OF_PAIRS * of_pairs)
        return total

    def _ids(self, drawn: Floats) -> Ints:
        """The inverse of the cumulative distribution of a continuous power law, cut to whole numbers."""
        if abs(self.zipf - 1.0) < 1e-9:
            place = (self.rows + 1.0) ** drawn
        else:
            power = 1.0 - self.zipf
            place = (1.0 + drawn * ((self.rows + 1.0) ** power - 1.0)) ** (1.0 / power)
        return np.clip(np.floor(place).astype(np.int64) - 1, 0, self.rows - 1)

    def _id_words(self, ids: Ints) -> Words:
        """Words for the effect and the vector of each id, which belong to its feature."""
        features = np.arange(self.features)[None, :, None, None]
        key = derive_seed(self.seed, "clicks", "effects")
        return words(key, features, ids[..., None], np.arange(1 + _VECTOR))


def _centred(drawn: Floats) -> Floats:
    """Mean 0 and variance 1."""
    return (2.0 * drawn - 1.0) * _ROOT_3


class ClicksSource:
    """Samples ``[first, last)`` of an unbounded click log."""

    def __init__(self, log: ClickLog, first: int, last: int, identity: str) -> None:
        self.identity = identity
        self._log = log
        self._first = first
        self._num_samples = last - first

    def __len__(self) -> int:
        return self._num_samples

    def read(self, indices: Ints) -> Batch:
        """About 10 microseconds a sample, on the defaults."""
        dense, ids, click, probability = self._log.draw(self._first + indices)
        floats = {"dense": dense, "click": click, "probability": probability}
        batch = {name: torch.from_numpy(value.astype(np.float32)) for name, value in floats.items()}
        return {**batch, "ids": torch.from_numpy(ids)}


@SOURCES.register("clicks")
def open_clicks(config: ClicksDataConfig, split: Split, seed: int) -> ClicksSource | None:
    """Evaluation samples come after the training samples, so that a job trains on ``num_samples``."""
    num_eval = num_held_out(config.num_samples + 1, config.eval_fraction, "clicks")
    if split == "eval" and num_eval == 0:
        return None
    first, last = (0, config.num_samples) if split == "train" else (config.num_samples, config.num_samples + num_eval)
    log = ClickLog(
        config.num_dense,
        config.features,
        config.rows,
        config.max_ids,
        config.zipf,
        config.signal,
        config.bias,
        config.log_seed,
    )
    return ClicksSource(log, first, last, f"clicks ({split}, {log}, samples {first}:{last})")
