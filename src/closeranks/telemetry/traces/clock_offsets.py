"""Puts the clocks of all ranks on one. Pure: instants in, offsets out.

Ranks of one machine read the same clock. Between machines, ranks meet before a trace in a few small collectives, and
each notes when it entered and when it left. Nobody leaves such a collective before everybody has entered it: that
bounds the difference of two clocks from both sides, and the middle of the tightest bounds is at most half of their
distance from the truth, whatever the network did meanwhile.

Clocks also drift, by some 10 us a second where no service steers them: a trace lasts seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Instants = Sequence[tuple[int, int]]
"""For each collective, when a rank entered and left it, in ns by its own clock."""
CONVERSION_NS = 50_000
"""How far torch's own times may be from ``time.time_ns()``, which it computes them from at both ends of a trace."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far a rank's clock is ahead of the first rank's."""

    offset_ns: int = 0
    error_ns: int | None = 0
    """At most so far from the truth; None: unknown."""


def clock_offsets(clocks: Mapping[int, str], instants: Mapping[int, Instants]) -> dict[int, ClockOffset]:
    """The offset of every rank in ``clocks``, which names the clock that each rank reads."""
    reference = clocks[min(clocks)]
    members: dict[str, list[Instants]] = {}
    for rank, clock in clocks.items():
        members.setdefault(clock, []).append(instants.get(rank, ()))
    found = {
        clock: ClockOffset() if clock == reference else _between(members[reference], own)
        for clock, own in members.items()
    }
    return {rank: found[clock] for rank, clock in clocks.items()}


def _between(reference: Sequence[Instants], other: Sequence[Instants]) -> ClockOffset:
    """How far the clock of the ``other`` ranks is ahead: nobody leaves before everybody has entered."""
    pairs = [pair for mine in reference for theirs in other for pair in zip(mine, theirs, strict=False)]
    if not pairs:
        return ClockOffset(0, None)
    least = max(their_enter - my_leave for (_, my_leave), (their_enter, _) in pairs)
    most = min(their_leave - my_enter for (my_enter, _), (_, their_leave) in pairs)
    return ClockOffset((least + most) // 2, max(0, most - least) // 2)
