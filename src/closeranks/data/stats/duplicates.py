"""Counts the documents that occur more than once, byte for byte.

Documents are compared by a 128-bit BLAKE3 digest. Invariant: memory is bounded: whenever there are more digests than
``limit``, the range of digests that are kept is halved. Equal documents have equal digests, so what is kept is a
uniform sample of distinct contents in which every copy of each is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

DIGEST_BYTES = 16
_KEY = np.dtype([("high", ">u8"), ("low", ">u8")])
LIMIT = 8 << 20
"""Maximum number of digests kept: 128 MiB."""


@dataclass(frozen=True, slots=True)
class DuplicateCounts:
    """What was found among the documents that were added."""

    num_seen: int
    num_kept: int
    """How many of those are in the sample."""
    num_repeated: int
    """Copies in the sample beyond the first of each content."""
    most: int
    """Copies of the most frequent content in the sample."""
    first_copies: tuple[int, ...]
    """Numbers of some documents that equal an earlier one."""

    @property
    def share(self) -> float:
        return self.num_repeated / max(self.num_kept, 1)

    @property
    def is_sample(self) -> bool:
        return self.num_kept < self.num_seen


class DuplicateFinder:
    """Call ``add`` for every document, in order; then ``counts``."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = max(2, limit)
        self._shift = 0
        """A digest is kept if this many of its leading bits are 0."""
        self._seen = 0
        self._kept: list[np.ndarray] = []
        self._numbers: list[np.ndarray] = []
        self._num_kept = 0
        self._new: list[bytes] = []

    def add(self, contents: Iterable[bytes | memoryview]) -> None:
        self._new += [blake3(content).digest(length=DIGEST_BYTES) for content in contents]
        if len(self._new) >= 1 << 16:
            self._take()

    def _take(self) -> None:
        digests = np.frombuffer(b"".join(self._new), dtype=_KEY)
        numbers = np.arange(self._seen, self._seen + len(digests), dtype=np.int64)
        self._seen += len(digests)
        self._new = []
        chosen = self._chosen(digests)
        self._kept.append(digests[chosen])
        self._numbers.append(numbers[chosen])
        self._num_kept += int(chosen.sum())
        while self._num_kept > self._limit and self._shift < 63:
            self._thin()

    def _chosen(self, digests: np.ndarray) -> np.ndarray:
        high = digests["high"].astype(np.uint64)
        return (high >> np.uint64(64 - self._shift)) == 0 if self._shift else np.ones(len(digests), dtype=bool)

    def _thin(self) -> None:
        self._shift += 1
        chosen = [self._chosen(digests) for digests in self._kept]
        self._kept = [digests[which] for digests, which in zip(self._kept, chosen, strict=True)]
        self._numbers = [numbers[which] for numbers, which in zip(self._numbers, chosen, strict=True)]
        self._num_kept = sum(map(len, self._kept))

    def counts(self, num_named: int = 5) -> DuplicateCounts:
        if self._new:
            self._take()
        digests = np.concatenate([np.zeros(0, dtype=_KEY), *self._kept])
        numbers = np.concatenate([np.zeros(0, dtype=np.int64), *self._numbers])
        order = np.lexsort((numbers, digests["low"], digests["high"]))
        digests, numbers = digests[order], numbers[order]
        is_copy = np.zeros(len(digests), dtype=bool)
        is_copy[1:] = digests[1:] == digests[:-1]
        groups = np.cumsum(~is_copy)
        most = int(np.bincount(groups).max()) if len(groups) else 0
        copies = np.sort(numbers[is_copy])[:num_named]
        return DuplicateCounts(
            num_seen=self._seen,
            num_kept=len(digests),
            num_repeated=int(is_copy.sum()),
            most=most,
            first_copies=tuple(copies.tolist()),
        )
