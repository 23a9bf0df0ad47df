"""A synthetic source for recommenders: samples of a user and an item, with a click and a rating.

Invariant: a sample is a pure function of its index, bit for bit, alone or in any batch; nothing is stored. Only the raw
bits of the generator are used, since the streams of its distributions may change between numpy versions.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from closeranks.core.protocols import Batch
from closeranks.core.seeds import derive_seed
from closeranks.data.config import PairsDataConfig
from closeranks.data.sampling.order import Ints
from closeranks.data.sources.registry import SOURCES, Split, num_held_out

Floats: TypeAlias = npt.NDArray[np.float64]

_SHARPNESS = 3.0
_RATING_NOISE = 0.1


class PairsSource:
    """Samples ``[first, last)`` of an unbounded synthetic data set."""

    def __init__(self, num_features: int, first: int, last: int, identity: str) -> None:
        self.identity = identity
        self._num_features = num_features
        self._first = first
        self._num_samples = last - first
        taste = _uniform(derive_seed("pairs", "taste"), num_features)
        # Divided by its own norm, so that the score has the same spread for any number of features.
        self._taste = taste * 3.0 / np.sqrt(np.square(taste).sum())

    def __len__(self) -> int:
        return self._num_samples

    def read(self, indices: Ints) -> Batch:
        """The better the features of user and item match, the likelier is a click; the rating is the same score with
        noise."""
        width = self._num_features
        drawn = np.stack([_uniform(self._first + int(index), 2 * width + 2) for index in indices])
        user, item, chance, noise = drawn[:, :width], drawn[:, width:-2], drawn[:, -2], drawn[:, -1]
        score = (user * item * self._taste).sum(axis=1)
        click = (chance + 1.0) / 2.0 < 1.0 / (1.0 + np.exp(-_SHARPNESS * score))
        values = {"user": user, "item": item, "click": click, "rating": score + _RATING_NOISE * noise}
        return {name: torch.from_numpy(value.astype(np.float32)) for name, value in values.items()}


def _uniform(key: int, count: int) -> Floats:
    """``count`` numbers in [-1, 1) from the top 53 bits of the generator's words. About 10 microseconds."""
    words = np.random.Philox(key=key).random_raw(count)
    return np.asarray(words >> np.uint64(11), dtype=np.float64) * 2.0**-52 - 1.0


@SOURCES.register("pairs")
def open_pairs(config: PairsDataConfig, split: Split, seed: int) -> PairsSource | None:
    """Evaluation samples come after the training samples, so that a job trains on ``num_samples``."""
    num_eval = num_held_out(config.num_samples + 1, config.eval_fraction, "pairs")
    if split == "eval" and num_eval == 0:
        return None
    first, last = (0, config.num_samples) if split == "train" else (config.num_samples, config.num_samples + num_eval)
    identity = f"pairs ({split}, {config.num_features} features, samples {first}:{last})"
    return PairsSource(config.num_features, first, last, identity)
