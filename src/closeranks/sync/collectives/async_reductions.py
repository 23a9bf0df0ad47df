"""Asynchronous reductions: sums that take several collectives and overlap with backward.

[Note: legs] An asynchronous reduction is a generator: each leg starts a collective and yields it, and the generator is
resumed once that has been waited for. The driver decides when. Collectives must never be issued from callbacks of
others (Gloo's workers would issue them in different orders on different ranks and abort), nor as soon as others happen
to be done: every rank must start all legs in the same order. So starting a bucket advances those before it by one leg,
and the end of the step runs the rest.

Invariant: the order in which legs start is a function of the order in which reductions begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


class PendingWork(Protocol):
    """A pending collective, or several: the part of ``dist.Work`` that a reduction needs."""

    def wait(self) -> object: ...


AsyncReduction = Iterator[PendingWork]


def run_reduction(journey: AsyncReduction) -> None:
    """Run a reduction to its end, waiting for each collective."""
    for work in journey:
        work.wait()


@dataclass(slots=True)
class _Traveller:
    journey: AsyncReduction
    work: PendingWork | None
    num_ahead: int
    """Collectives that it has still to start."""

    def move(self) -> None:
        """Wait for the pending collective and start the next; after the last, the reduction is done."""
        if self.work is not None:
            self.work.wait()
        self.work = next(self.journey, None)
        self.num_ahead -= 1


class InFlightReductions:
    """The reductions in flight."""

    def __init__(self) -> None:
        self._travellers: list[_Traveller] = []

    def add(self, journey: AsyncReduction, num_legs: int) -> None:
        """Start a reduction. Earlier ones that have collectives left to start advance by one; the others are not waited
        for: they have nothing to start, and backward should not be held up."""
        waiting = [one for one in self._travellers if one.num_ahead > 0]
        self._travellers.append(_Traveller(journey, next(journey, None), num_legs - 1))
        for one in waiting:
            one.move()

    def wait_all(self) -> None:
        """Wait for all reductions."""
        while self._travellers:
            waiting, self._travellers = self._travellers, []
            for one in waiting:
                one.move()
                if one.work is not None:
                    self._travellers.append(one)

    def wait_until(self, num_left: int) -> None:
        """Wait for the oldest reductions until ``num_left`` are left."""
        while len(self._travellers) > num_left:
            oldest = self._travellers.pop(0)
            while oldest.work is not None:
                oldest.move()

    def wait_for(self, journey: AsyncReduction) -> None:
        """Wait for a reduction and all before it; does nothing if it is done already."""
        for place, one in enumerate(self._travellers):
            if one.journey is journey:
                self.wait_until(len(self._travellers) - place - 1)
                return

    def __len__(self) -> int:
        return len(self._travellers)
