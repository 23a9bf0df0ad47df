"""How do sums that take several collectives run beside backward?

[Note: legs] A journey is a generator: each leg starts a collective and yields it, and goes on when somebody has waited
for it. Who drives decides when. Collectives must never be issued from callbacks of others (Gloo's workers would issue
them in different orders on different ranks and abort), nor when they happen to be done: every rank must start all legs
in the same order. So a bucket that leaves moves those before it on by one leg, and the end of the step the rest.

Invariant: the order in which legs start is a function of the order in which journeys begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


class Awaited(Protocol):
    """A collective under way, or several: as much of ``dist.Work`` as a journey needs."""

    def wait(self) -> object: ...


Journey = Iterator[Awaited]


def travel(journey: Journey) -> None:
    """The whole way at once."""
    for work in journey:
        work.wait()


@dataclass(slots=True)
class _Traveller:
    journey: Journey
    work: Awaited | None
    num_ahead: int
    """Legs that it has still to start."""

    def move(self) -> None:
        """Wait for this leg and start the next; after the last, arrive."""
        if self.work is not None:
            self.work.wait()
        self.work = next(self.journey, None)
        self.num_ahead -= 1


class Convoy:
    """Journeys that are under way."""

    def __init__(self) -> None:
        self._travellers: list[_Traveller] = []

    def add(self, journey: Journey, num_legs: int) -> None:
        """Start a journey. Those before it that have legs to start yet move on by one; the others are not waited for:
        they have nothing to start, and backward has something to do."""
        waiting = [one for one in self._travellers if one.num_ahead > 0]
        self._travellers.append(_Traveller(journey, next(journey, None), num_legs - 1))
        for one in waiting:
            one.move()

    def finish(self) -> None:
        """All arrive."""
        while self._travellers:
            waiting, self._travellers = self._travellers, []
            for one in waiting:
                one.move()
                if one.work is not None:
                    self._travellers.append(one)

    def shorten(self, num_left: int) -> None:
        """The oldest arrive, until so many are left."""
        while len(self._travellers) > num_left:
            oldest = self._travellers.pop(0)
            while oldest.work is not None:
                oldest.move()

    def see_in(self, journey: Journey) -> None:
        """It arrives, after all before it; nothing where it has arrived."""
        for place, one in enumerate(self._travellers):
            if one.journey is journey:
                self.shorten(len(self._travellers) - place - 1)
                return

    def __len__(self) -> int:
        return len(self._travellers)
