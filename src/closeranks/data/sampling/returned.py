"""Which micro-batches were returned by a step that did not take them, and who computes them again?

A step with backup workers leaves out the gradients of late ones (``sync.server.backup``). The micro-batches behind them
are *returned*: the next step has them beside its own, given to the workers with the least to do, first to those that
were not late. A step that ends an epoch, or the run, leaves out nobody. Pure: a function of the schedule and of whom
each step took, so that all ranks agree without communication. Invariant: every position of an epoch is taken by exactly
one step, and the run's cursor stays one integer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from closeranks.data.sampling.batch_schedule import BatchSchedule, MicroBatch

_FIELDS = ("step", "index", "first", "last")


class ReturnedMicroBatches:
    """Call sequence: ``assigned`` before each step, ``settle`` once it is known whom the step took."""

    def __init__(self, schedule: BatchSchedule, num_workers: int) -> None:
        self._schedule, self._num_workers = schedule, num_workers
        self.waiting: tuple[MicroBatch, ...] = ()
        """In the order in which they were returned."""
        self._late: frozenset[int] = frozenset()
        """Workers that the last step left out."""

    def assigned(self, step: int, worker: int) -> tuple[MicroBatch, ...]:
        """The returned micro-batches that a worker computes in ``step``, before its own."""
        return self._shares(step)[worker]

    def busy(self, step: int) -> tuple[int, ...]:
        """The workers that have a micro-batch in ``step``."""
        shares = self._shares(step)
        return tuple(worker for worker, share in enumerate(shares) if share or self._own(step, worker))

    def num_samples(self, step: int, worker: int) -> int:
        return sum(one.num_samples for one in (*self.assigned(step, worker), *self._own(step, worker)))

    def must_take_all(self, step: int) -> bool:
        """Whether ``step`` ends an epoch or the run."""
        schedule = self._schedule
        begin, end = schedule.position(step), schedule.position(step + 1)
        return step == schedule.num_steps - 1 or begin // schedule.num_samples < end // schedule.num_samples

    def settle(self, step: int, taken: Collection[int]) -> None:
        """``taken``: the workers whose gradients the step took."""
        shares = self._shares(step)
        late = [worker for worker in self.busy(step) if worker not in taken]
        self.waiting = tuple(one for worker in late for one in (*shares[worker], *self._own(step, worker)))
        self._late = frozenset(late)

    def state(self) -> list[list[int]]:
        return [[getattr(one, name) for name in _FIELDS] for one in self.waiting]

    def load(self, rows: Iterable[Sequence[int]]) -> None:
        self.waiting = tuple(MicroBatch(step, index, first, last) for step, index, first, last in rows)
        self._late = frozenset()

    def _own(self, step: int, worker: int) -> tuple[MicroBatch, ...]:
        return self._schedule.assigned(step, worker, self._num_workers)

    def _shares(self, step: int) -> list[tuple[MicroBatch, ...]]:
        """By worker: the returned micro-batches that it computes."""
        shares: list[tuple[MicroBatch, ...]] = [()] * self._num_workers
        counts = [len(self._own(step, worker)) for worker in range(self._num_workers)] if self.waiting else []
        for one in self.waiting:
            worker = min(range(self._num_workers), key=lambda at: (counts[at], at in self._late, at))
            shares[worker] = (*shares[worker], one)
            counts[worker] += 1
        return shares
