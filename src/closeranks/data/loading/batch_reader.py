"""Reads a rank's micro-batches of one step, as tensors in host memory.

Invariants: a micro-batch holds the same samples whichever process reads it, and whether it is prefetched or read inside
its step; every batch returned has passed the job's checks and lists the samples that were left out of it; any failure
while reading is an error that names the data and the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor

from closeranks.core.protocols import Batch, DataSource
from closeranks.data.dataset_protocol import Ints
from closeranks.data.loading.lookahead import SampleLookahead
from closeranks.data.loading.quarantine import BadSample
from closeranks.data.loading.read_settings import ReadSettings
from closeranks.data.loading.sample_reader import MAX_STAND_INS, SampleReader
from closeranks.data.sampling.order import BatchSchedule, MicroBatch, SampleOrder
from closeranks.data.source import LoaderSource, as_loader_source
from closeranks.data.timing import StageTimes, measure

Packed: TypeAlias = tuple[Batch, tuple[BadSample, ...], tuple[float, float, float, float]]


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """A micro-batch with its samples."""

    micro_batch: MicroBatch
    batch: Batch
    skipped: tuple[BadSample, ...] = ()
    """The bad samples that were left out of the batch."""
    times: StageTimes = field(default_factory=StageTimes)

    def to_message(self) -> Packed:
        """Only what the receiving process does not know already, as few plain objects: pickling costs time per
        object."""
        times = self.times
        return self.batch, self.skipped, (times.read_s, times.fetch_s, times.decode_s, times.collate_s)

    @classmethod
    def from_message(cls, micro_batch: MicroBatch, packed: Packed) -> LoadedBatch:
        batch, skipped, times = packed
        return cls(_without(micro_batch, len(skipped)), batch, skipped, StageTimes(*times))


def _without(micro_batch: MicroBatch, num_skipped: int) -> MicroBatch:
    """The micro-batch without its bad samples; if none are left, its weight is zero."""
    if not num_skipped:
        return micro_batch
    is_padding = micro_batch.is_padding or num_skipped == micro_batch.last - micro_batch.first
    return replace(micro_batch, is_padding=is_padding, num_skipped=num_skipped)


@dataclass(frozen=True, slots=True)
class WorkerSlice:
    """The micro-batches that one of several loader workers reads: every ``count``-th of the rank's, starting with
    ``number``."""

    number: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Everything that determines what a rank reads; can be pickled if the source can."""

    source: DataSource
    order: SampleOrder
    schedule: BatchSchedule
    data_rank: int | None = 0
    """None: a rank that computes no micro-batch."""
    data_size: int = 1
    settings: ReadSettings = field(default_factory=ReadSettings)
    even: bool = False
    """Whether ranks with fewer micro-batches read a padding micro-batch."""
    known: Mapping[int, BadSample] = field(default_factory=dict)
    """Samples that are in quarantine when reading starts."""
    shares: tuple[int, ...] = ()
    """Micro-batches per step of each replica or data rank, where they do not all take the same number."""

    def assigned(self, step: int) -> tuple[MicroBatch, ...]:
        if self.data_rank is None:
            return ()
        return self.schedule.assigned(step, self.data_rank, self.data_size, even=self.even, shares=self.shares)

    def micro_batches_from(self, step: int, worker_slice: WorkerSlice) -> Iterator[MicroBatch]:
        """All micro-batches of a worker's slice from ``step`` to the end of the run, numbered from ``step`` on."""
        number = 0
        for later in range(step, self.schedule.num_steps):
            for micro_batch in self.assigned(later):
                if number % worker_slice.count == worker_slice.number:
                    yield micro_batch
                number += 1


class BatchReader:
    """Reads the micro-batches of a plan in order, from one step on; a reader has one current position."""

    def __init__(self, plan: ReadPlan, step: int, worker_slice: WorkerSlice | None = None) -> None:
        self.plan = plan
        self.source: LoaderSource = as_loader_source(plan.source)
        self._sample_reader = SampleReader(self.source, plan.settings, plan.known)
        sequence = plan.micro_batches_from(step, worker_slice or WorkerSlice())
        self._lookahead = SampleLookahead(self.source, plan.order, sequence, plan.settings.max_wanted)

    def read(self, step: int) -> list[LoadedBatch]:
        """This rank's micro-batches of the next step; possibly none if the step has fewer micro-batches than there are
        ranks. Only for a reader that is not restricted to a worker's slice."""
        return [self.read_next() for _ in self.plan.assigned(step)]

    def read_next(self) -> LoadedBatch:
        planned = self._lookahead.next()
        return self._read(planned.micro_batch, planned.ids)

    def read_again(self, micro_batch: MicroBatch) -> LoadedBatch:
        """A micro-batch of any step, besides those of the sequence."""
        return self._read(micro_batch, self.plan.order.between(micro_batch.first, micro_batch.last))

    def _read(self, micro_batch: MicroBatch, ids: Ints) -> LoadedBatch:
        with measure() as times:
            checked = self._sample_reader.read(ids, self._after(micro_batch))
        return LoadedBatch(_without(micro_batch, len(checked.skipped)), checked.batch, checked.skipped, times)

    def _after(self, micro_batch: MicroBatch) -> Iterator[Ints]:
        """The samples that follow in the order, in batches of the same size: replacements for a batch whose samples are
        all bad."""
        size = micro_batch.last - micro_batch.first
        for number in range(MAX_STAND_INS):
            first = micro_batch.last + number * size
            yield self.plan.order.between(first, first + size)


def map_tensors(value: Any, apply: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``apply`` called on every tensor in its dicts, lists and tuples; anything else is unchanged."""
    if isinstance(value, Tensor):
        return apply(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, apply) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, apply) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
