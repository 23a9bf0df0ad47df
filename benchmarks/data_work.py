"""Which bytes do all loaders of the data benchmark read, and what must each of them give?

Two sets: ``tokens`` (samples of 129 ids, windows of one stream that overlap by one id) and ``records`` (about 10 KB of
bytes and a label). Invariant: every contender hands out torch tensors of the same shapes and types in batches of the
same size; the sum over an epoch is the same for all, so nobody leaves out or repeats anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

SEQ_LEN = 128
RECORD_BYTES = 10_000
NUM_LABELS = 100


@dataclass(frozen=True, slots=True)
class Work:
    """What one contender shall do."""

    kind: str
    """``tokens`` or ``records``."""
    num_samples: int
    workers: int
    shuffle: str
    """``full``: any sample beside any other; ``blocks``: a window or buffer of neighbours; ``none``."""
    batch: int
    folder: str
    seed: int = 7

    def place(self, name: str) -> Path:
        return Path(self.folder) / f"{self.kind}-{name}"


class Contender(Protocol):
    """One loader. ``prepare`` writes the bytes in its own format, once; ``open`` gives what is iterated once an epoch.
    Worker processes live on from one epoch to the next where the loader can do that."""

    def supports(self, work: Work) -> bool: ...

    def prepare(self, work: Work) -> None: ...

    def open(self, work: Work, *, endless: bool) -> Iterable[dict[str, Any]]:
        """Batches ``{"tokens": [B, 129]}`` or ``{"data": [B, 10000] uint8, "label": [B]}``. ``endless``: one iteration
        may go on for ever."""
        ...


def stream(num_samples: int) -> npt.NDArray[np.uint16]:
    """The tokens that windows are cut from."""
    return np.random.default_rng(1).integers(0, 50_000, num_samples * SEQ_LEN + 1, dtype=np.uint16)


def windows(num_samples: int) -> npt.NDArray[np.uint16]:
    return np.lib.stride_tricks.sliding_window_view(stream(num_samples), SEQ_LEN + 1)[::SEQ_LEN]


def records(num_samples: int) -> Iterator[tuple[bytes, int]]:
    random = np.random.default_rng(2)
    for number in range(num_samples):
        yield random.bytes(RECORD_BYTES), number % NUM_LABELS


def checksum(batch: dict[str, Any]) -> int:
    """Adds up over an epoch to the same number for everybody."""
    if "tokens" in batch:
        return int(batch["tokens"].to(torch.int64).sum())
    return int(batch["data"].to(torch.int64).sum()) + int(batch["label"].to(torch.int64).sum())


def num_rows(batch: dict[str, Any]) -> int:
    return len(batch["tokens"] if "tokens" in batch else batch["label"])
