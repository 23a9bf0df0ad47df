"""Computes which samples a reader reads next, and announces them to the source in advance.

Positions are mapped to samples a few thousand at a time, since one call of the order costs as much as a batch, and only
for the positions that this reader will read. Remote data must be requested before it is read. Invariant: a source is
told only what will be read, in reading order; the window advances by half its length at a time, so that the cost of
announcing is negligible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from closeranks.data.dataset_protocol import Ints
from closeranks.data.sampling.order import MicroBatch, SampleOrder
from closeranks.data.source import LoaderSource

_FILL_SAMPLES = 2048
_FILL_MICRO_BATCHES = 256
_MAX_WANTED_SAMPLES = 1 << 14
"""Upper limit in samples, whatever the number of micro-batches in a window: with large micro-batches, fewer suffice to
hide the fetching."""


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A micro-batch before it is read."""

    micro_batch: MicroBatch
    ids: Ints


class SampleLookahead:
    def __init__(
        self, source: LoaderSource, order: SampleOrder, micro_batches: Iterator[MicroBatch], max_wanted: int
    ) -> None:
        self._source = source
        self._order = order
        self._micro_batches = micro_batches
        self._max_wanted = max_wanted
        self._window: deque[PlannedBatch] = deque()
        self._num_announced = 0

    def next(self) -> PlannedBatch:
        """Never raises ``StopIteration``: the caller knows the schedule."""
        if 2 * self._num_announced <= self._max_wanted:
            self._announce()
        elif not self._window:
            self._fill()
        self._num_announced = max(0, self._num_announced - 1)
        return self._window.popleft()

    def _announce(self) -> None:
        while len(self._window) < max(self._max_wanted, 1) and self._fill():
            pass
        wanted, left = [], _MAX_WANTED_SAMPLES
        for planned in islice(self._window, self._max_wanted):
            wanted.append(planned.ids)
            left -= len(planned.ids)
            if left <= 0:
                break
        if len(wanted) > self._num_announced:  # at the end of the run there is nothing new to announce
            self._source.prefetch(np.concatenate(wanted))
            self._num_announced = len(wanted)

    def _fill(self) -> bool:
        """Look up the samples of some more micro-batches; returns whether there were any."""
        new: list[MicroBatch] = []
        count = 0
        for micro_batch in islice(self._micro_batches, _FILL_MICRO_BATCHES):
            new.append(micro_batch)
            count += micro_batch.num_samples
            if count >= _FILL_SAMPLES:
                break
        if not new:
            return False
        ids = self._order.at(np.concatenate([np.arange(one.first, one.last, dtype=np.int64) for one in new]))
        at = 0
        for one in new:
            self._window.append(PlannedBatch(one, ids[at : at + one.num_samples]))
            at += one.num_samples
        return True
