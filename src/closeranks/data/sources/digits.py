"""The source of scikit-learn's handwritten digits.

Invariant: the seed alone decides whether an image is in the training or in the evaluation part.
"""

from __future__ import annotations

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from closeranks.core.errors import DataError
from closeranks.core.protocols import Batch
from closeranks.core.seeds import derive_seed
from closeranks.data.config import DigitsDataConfig
from closeranks.data.sampling.order import Ints, permute
from closeranks.data.sources.registry import SOURCES, Split, num_held_out

_BRIGHTEST = 16.0


class DigitsSource:
    """Images ``[B, 1, 8, 8]`` from 0 to 1 and their labels, all in memory."""

    def __init__(self, images: Tensor, labels: Tensor, identity: str) -> None:
        self.identity = identity
        self._images = images
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, indices: Ints) -> Batch:
        rows = torch.from_numpy(indices)
        return {"image": self._images[rows], "label": self._labels[rows]}


@SOURCES.register("digits")
def open_digits(config: DigitsDataConfig, split: Split, seed: int) -> DigitsSource | None:
    images, labels = _load()
    num_eval = num_held_out(len(labels), config.eval_fraction, "digits")
    if split == "eval" and num_eval == 0:
        return None
    shuffled = permute(np.arange(len(labels)), len(labels), derive_seed(seed, "split")).astype(np.int64)
    kept = np.sort(shuffled[:num_eval] if split == "eval" else shuffled[num_eval:])
    rows = torch.from_numpy(kept)
    digest = blake3(images.numpy().tobytes() + kept.tobytes()).hexdigest(length=16)
    return DigitsSource(images[rows], labels[rows], f"digits ({split}, blake3 {digest})")


def _load() -> tuple[Tensor, Tensor]:
    """Importing scikit-learn takes about a second, which only jobs that use digits pay."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        fix = "Install it: pip install 'closeranks[digits]'."
        raise DataError(f"the digits come with scikit-learn, and '{error.name}' is not installed", fix) from error
    digits = load_digits()
    images = torch.from_numpy(digits.images.astype(np.float32) / _BRIGHTEST).unsqueeze(1)
    return images, torch.from_numpy(digits.target.astype(np.int64))
