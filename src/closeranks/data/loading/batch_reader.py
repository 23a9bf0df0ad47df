"""What are a rank's batches of one step, as tensors in host memory?

Invariants: a micro-batch holds the same samples whoever reads it, ahead of its step or in it; what leaves here has
passed the job's checks, and what was left out is named with it; whatever goes wrong while reading is an error that
names the data and the samples.
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
    """Samples of the micro-batch that its batch lacks."""
    times: StageTimes = field(default_factory=StageTimes)

    def to_message(self) -> Packed:
        """What another process does not know already, in few and plain pieces: each object costs when it is sent."""
        times = self.times
        return self.batch, self.skipped, (times.read_s, times.fetch_s, times.decode_s, times.collate_s)

    @classmethod
    def from_message(cls, micro_batch: MicroBatch, packed: Packed) -> LoadedBatch:
        batch, skipped, times = packed
        return cls(_without(micro_batch, len(skipped)), batch, skipped, StageTimes(*times))


def _without(micro_batch: MicroBatch, num_skipped: int) -> MicroBatch:
    """A micro-batch of which so many samples were bad; one that has none left weighs nothing."""
    if not num_skipped:
        return micro_batch
    is_padding = micro_batch.is_padding or num_skipped == micro_batch.last - micro_batch.first
    return replace(micro_batch, is_padding=is_padding, num_skipped=num_skipped)


@dataclass(frozen=True, slots=True)
class WorkerSlice:
    """Every ``count``-th micro-batch of a rank, from ``number`` on: what one of several processes reads."""

    number: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Everything that decides what a rank reads; can be sent to another process if the source can."""

    source: DataSource
    order: SampleOrder
    schedule: BatchSchedule
    data_rank: int = 0
    data_size: int = 1
    settings: ReadSettings = field(default_factory=ReadSettings)
    even: bool = False
    """Whether ranks with fewer micro-batches read a spare."""
    known: Mapping[int, BadSample] = field(default_factory=dict)
    """Samples in quarantine when reading starts."""
    shares: tuple[int, ...] = ()
    """How many micro-batches of a step each replica takes, where they do not take as many."""

    def assigned(self, step: int) -> tuple[MicroBatch, ...]:
        return self.schedule.assigned(step, self.data_rank, self.data_size, even=self.even, shares=self.shares)

    def micro_batches_from(self, step: int, share: WorkerSlice) -> Iterator[MicroBatch]:
        """All micro-batches of a share from ``step`` to the end of the run, counted from ``step`` on."""
        number = 0
        for later in range(step, self.schedule.num_steps):
            for micro_batch in self.assigned(later):
                if number % share.count == share.number:
                    yield micro_batch
                number += 1


class BatchReader:
    """Reads a plan, micro-batch after micro-batch from one step on; a reader stands at one place."""

    def __init__(self, plan: ReadPlan, step: int, share: WorkerSlice | None = None) -> None:
        self.plan = plan
        self.source: LoaderSource = as_loader_source(plan.source)
        self._rows = SampleReader(self.source, plan.settings, plan.known)
        sequence = plan.micro_batches_from(step, share or WorkerSlice())
        self._coming = SampleLookahead(self.source, plan.order, sequence, plan.settings.max_wanted)

    def read(self, step: int) -> list[LoadedBatch]:
        """All micro-batches of the step the reader stands before; none where the step has fewer than there are ranks.
        Only for a reader without a share."""
        return [self.read_next() for _ in self.plan.assigned(step)]

    def read_next(self) -> LoadedBatch:
        planned = self._coming.next()
        micro_batch = planned.micro_batch
        with measure() as times:
            rows = self._rows.read(planned.ids, self._after(micro_batch))
        return LoadedBatch(_without(micro_batch, len(rows.skipped)), rows.batch, rows.skipped, times)

    def _after(self, micro_batch: MicroBatch) -> Iterator[Ints]:
        """The samples that follow in the order, as many at a time: stand-ins for a batch that is bad throughout."""
        size = micro_batch.last - micro_batch.first
        for number in range(MAX_STAND_INS):
            first = micro_batch.last + number * size
            yield self.plan.order.between(first, first + size)


def map_tensors(value: Any, apply: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with every tensor in its dicts, lists and tuples replaced; anything else stays as it is."""
    if isinstance(value, Tensor):
        return apply(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, apply) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, apply) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
