"""Assigns micro-batches of each step to ranks.

Positions of the run are divided into steps, steps into micro-batches, and those among the data ranks. Invariant: the
cursor of a run is one integer, and a micro-batch has the same positions, hence the same samples, whichever rank takes
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from closeranks.core.errors import DataError
from closeranks.data.sampling.cursor import Cursor, position_after, steps_to
from closeranks.data.sampling.permutation import Ints, sample_indices


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward: its global identity (step, index) and its positions ``[first, last)``."""

    step: int
    index: int
    first: int
    last: int
    is_padding: bool = False
    """Computed so that all ranks have the same number, and not counted: its loss has no weight."""
    num_skipped: int = 0
    """Bad samples that were left out when it was read."""

    @property
    def num_samples(self) -> int:
        return self.last - self.first - self.num_skipped

    def indices(self, num_samples: int, seed: int) -> Ints:
        """The samples of this micro-batch in a dataset of ``num_samples``."""
        return sample_indices(np.arange(self.first, self.last, dtype=np.int64), num_samples, seed)


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """How the positions of a run are divided into steps and micro-batches, and those among the data ranks.

    A step is ``global_batch`` positions, cut into micro-batches of ``micro_batch``; the last of a step may be short. If
    ``total_samples`` ends the run, the last step is short, and a step beyond it is empty. ``ends``: where earlier parts
    of a continued run ended inside a step, see ``data.sampling.cursor``.
    """

    num_samples: int
    global_batch: int
    micro_batch: int
    num_steps: int
    total_samples: int | None = None
    ends: tuple[Cursor, ...] = ()

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError("the dataset is empty", "Give it at least one sample.")
        if min(self.global_batch, self.micro_batch) < 1 or self.num_steps < 0 or (self.total_samples or 0) < 0:
            raise ValueError(f"a schedule needs batches of at least one sample and no negative counts: {self}")

    @classmethod
    def for_steps(
        cls, num_samples: int, global_batch: int, micro_batch: int, steps: int, ends: tuple[Cursor, ...] = ()
    ) -> BatchSchedule:
        """``steps`` full steps (except for ``ends``), over as many epochs as that takes."""
        return cls(num_samples, global_batch, micro_batch, steps, ends=ends)

    @classmethod
    def for_epochs(
        cls, num_samples: int, global_batch: int, micro_batch: int, epochs: float, ends: tuple[Cursor, ...] = ()
    ) -> BatchSchedule:
        """Every sample ``epochs`` times (a fraction of an epoch rounds to samples); the last step may be short."""
        total = total_for_epochs(num_samples, epochs)
        return cls(num_samples, global_batch, micro_batch, steps_to(total, global_batch, ends), total, ends)

    def position(self, step: int) -> int:
        """The cursor before ``step``: the number of positions that earlier steps used up."""
        reached = position_after(step, self.global_batch, self.ends)
        if self.total_samples is None:
            return reached
        return min(reached, max(self.total_samples, self.ends[-1].position if self.ends else 0))

    @property
    def micro_batches_per_step(self) -> int:
        """Of a step of full length."""
        return -(-self.global_batch // self.micro_batch)

    def num_micro_batches(self, step: int) -> int:
        return -(-(self.position(step + 1) - self.position(step)) // self.micro_batch)

    def micro_batches(self, step: int) -> tuple[MicroBatch, ...]:
        """All micro-batches of a step, in order."""
        return self._between(step, 0, self.num_micro_batches(step))

    def assigned(
        self, step: int, data_rank: int, data_size: int, *, even: bool = False, shares: Sequence[int] = ()
    ) -> tuple[MicroBatch, ...]:
        """This rank's contiguous share of the step; if it does not divide evenly, the first ranks take one more.

        ``even``: the other ranks repeat the step's last micro-batch as padding, so that all ranks have the same number
        (if each forward is a collective, a rank with one less would leave the others waiting). ``shares``: the number
        of micro-batches of each replica, which divides them among its own ranks; a step with another number of
        micro-batches (the last may have one) is divided evenly.
        """
        if not 0 <= data_rank < data_size:
            raise ValueError(f"there is no data rank {data_rank} of {data_size}")
        begin, count = 0, self.num_micro_batches(step)
        last = count - 1
        if shares and sum(shares) == count:
            number, data_rank = divmod(data_rank, data_size // len(shares))
            begin, count, data_size = sum(shares[:number]), shares[number], data_size // len(shares)
        share, extra = divmod(count, data_size)
        first = begin + data_rank * share + min(data_rank, extra)
        own = self._between(step, first, first + share + (data_rank < extra))
        if not even or not extra or data_rank < extra:
            return own
        return (*own, replace(self._between(step, last, last + 1)[0], is_padding=True))

    def _between(self, step: int, first: int, last: int) -> tuple[MicroBatch, ...]:
        """Micro-batches ``first`` to ``last`` of a step, without creating the others: a step may have thousands."""
        begin, end = self.position(step), self.position(step + 1)
        cuts = [min(begin + index * self.micro_batch, end) for index in range(first, last + 1)]
        return tuple(MicroBatch(step, first + n, cuts[n], cuts[n + 1]) for n in range(last - first))


def total_for_epochs(num_samples: int, epochs: float) -> int:
    """Number of samples in ``epochs`` passes, at least one."""
    return max(1, round(num_samples * epochs))
