"""Asynchronous reductions: sums that take several collectives and overlap with backward.

[Note: async reductions] An asynchronous reduction is a generator: it starts a collective and yields it, and is resumed
once that has been waited for. The driver decides when. Collectives must never be issued from callbacks of others
(Gloo's workers would issue them in different orders on different ranks and abort), nor as soon as others happen to be
done: every rank must start all collectives in the same order. So starting a bucket advances those before it by one
collective, and the end of the step runs the rest.

Invariant: the order in which collectives start is a function of the order in which reductions begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from closeranks.core.phases import PendingWork

AsyncReduction = Iterator[PendingWork]


def run_reduction(reduction: AsyncReduction) -> None:
    """Run a reduction to its end, waiting for each collective."""
    for work in reduction:
        work.wait()


@dataclass(slots=True)
class _InFlight:
    reduction: AsyncReduction
    work: PendingWork | None
    num_ahead: int
    """Collectives that it has still to start."""

    def advance(self) -> None:
        """Wait for the pending collective and start the next; after the last, the reduction is done."""
        if self.work is not None:
            self.work.wait()
        self.work = next(self.reduction, None)
        self.num_ahead -= 1


class InFlightReductions:
    """The reductions in flight."""

    def __init__(self) -> None:
        self._in_flight: list[_InFlight] = []

    def add(self, reduction: AsyncReduction, num_collectives: int) -> None:
        """Start a reduction. Earlier ones that have collectives left to start advance by one; the others are not waited
        for: they have nothing to start, and backward should not be held up."""
        waiting = [one for one in self._in_flight if one.num_ahead > 0]
        self._in_flight.append(_InFlight(reduction, next(reduction, None), num_collectives - 1))
        for one in waiting:
            one.advance()

    def wait_all(self) -> None:
        """Wait for all reductions."""
        while self._in_flight:
            waiting, self._in_flight = self._in_flight, []
            for one in waiting:
                one.advance()
                if one.work is not None:
                    self._in_flight.append(one)

    def wait_until(self, num_left: int) -> None:
        """Wait for the oldest reductions until ``num_left`` are left."""
        while len(self._in_flight) > num_left:
            oldest = self._in_flight.pop(0)
            while oldest.work is not None:
                oldest.advance()

    def wait_for(self, reduction: AsyncReduction) -> None:
        """Wait for a reduction and all before it; does nothing if it is done already."""
        for index, one in enumerate(self._in_flight):
            if one.reduction is reduction:
                self.wait_until(len(self._in_flight) - index - 1)
                return

    def __len__(self) -> int:
        return len(self._in_flight)
