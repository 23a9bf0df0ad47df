"""Finds where ranks stopped issuing the same collectives, from the records of all of them. Pure.

The collectives of a group are numbered on each rank, so those with one number must match: in their operation, in what
they send, and in its size where the operation needs equal sizes. The first pair that does not match is where the ranks
parted. Which of them is wrong is a matter of numbers; of two ranks, the one that departs from what it did before.
Invariant: ranks that may differ (the parts of an all-to-all) are never reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from closeranks.agent.detection.standstill.collective_record import Collective

MismatchKind = Literal["shape", "dtype", "order", "branch"]
_ANY_SHAPE = frozenset({"all_to_all", "barrier", "unknown"})
_MAX_CONTEXT = 6
"""How many collectives before one are looked at to tell which usually follows."""

_Signature = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Two collectives with the same number in the same group that are not the same."""

    kind: MismatchKind
    group: str
    sequence: int
    odd: tuple[int, ...]
    """The ranks that are probably wrong; empty if that cannot be told."""
    of_rank: Mapping[int, Collective]
    """What each rank issued, by rank."""

    @property
    def ranks_by_collective(self) -> list[tuple[tuple[int, ...], Collective]]:
        """Which ranks issued the same; most ranks first."""
        found: dict[_Signature, list[int]] = {}
        for rank, one in sorted(self.of_rank.items()):
            found.setdefault(_signature(one), []).append(rank)
        groups = [(tuple(ranks), self.of_rank[ranks[0]]) for ranks in found.values()]
        return sorted(groups, key=lambda group: (group[0][0] in self.odd, -len(group[0]), group[0]))


def find_mismatch(collectives: Mapping[int, Sequence[Collective]]) -> Mismatch | None:
    """The first mismatch, or None. ``collectives``: the newest of each rank, oldest first."""
    found = [mismatch for group in _groups(collectives) if (mismatch := _first_of(group, collectives)) is not None]
    return max(found, key=lambda one: max(row.age_s for row in one.of_rank.values()), default=None)


def _groups(collectives: Mapping[int, Sequence[Collective]]) -> list[str]:
    return sorted({one.group for rows in collectives.values() for one in rows if one.group})


def _first_of(group: str, collectives: Mapping[int, Sequence[Collective]]) -> Mismatch | None:
    rows = {
        rank: [one for one in all_of if one.group == group and one.sequence] for rank, all_of in collectives.items()
    }
    by_sequence = {rank: {one.sequence: one for one in own} for rank, own in rows.items()}
    for sequence in sorted({number for own in by_sequence.values() for number in own}):
        issued = {rank: own[sequence] for rank, own in by_sequence.items() if sequence in own}
        if len(set(map(_signature, issued.values()))) > 1 and _matters(issued):
            odd = _odd_ranks(issued, rows)
            return Mismatch(_kind(issued, odd, rows), group, sequence, odd, issued)
    return None


def _matters(issued: Mapping[int, Collective]) -> bool:
    """One that all ranks have completed did no harm, except where numbers of different tensors were added up."""
    return any(not one.is_done or one.op == "all_reduce" for one in issued.values())


def _signature(one: Collective) -> _Signature:
    return one.op, one.dtype if one.op not in _ANY_SHAPE else "", () if one.op in _ANY_SHAPE else one.shape


def _odd_ranks(issued: Mapping[int, Collective], rows: Mapping[int, Sequence[Collective]]) -> tuple[int, ...]:
    (usual, count), *_ = Counter(map(_signature, issued.values())).most_common()
    if 2 * count > len(issued):
        return tuple(sorted(rank for rank, one in issued.items() if _signature(one) != usual))
    strange = {rank for rank, one in issued.items() if _departs(one, rows[rank])}
    return tuple(sorted(strange)) if len(strange) < len(issued) else ()


def _departs(one: Collective, rows: Sequence[Collective]) -> bool:
    """Whether a rank issued something else than after the same collectives before. False where it is not known."""
    history = [(_signature(row), row.place) for row in rows if row.sequence < one.sequence]
    for length in range(min(_MAX_CONTEXT, len(history)), 0, -1):
        context = history[-length:]
        for end in range(len(history) - 1, length - 1, -1):
            if history[end - length : end] == context:
                return history[end] != (_signature(one), one.place)
    return False


def _kind(
    issued: Mapping[int, Collective], odd: Sequence[int], rows: Mapping[int, Sequence[Collective]]
) -> MismatchKind:
    first, second = next(_different_pairs(issued, odd))
    one, other = issued[first], issued[second]
    if _is_swapped(one, other, rows[first], rows[second]):
        return "order"
    if (one.op, one.place) != (other.op, other.place):
        return "branch"
    return "shape" if one.dtype == other.dtype else "dtype"


def _is_swapped(
    one: Collective, other: Collective, rows: Sequence[Collective], others_rows: Sequence[Collective]
) -> bool:
    """Whether a rank issues first what the other issues next: by what either has issued since, else by what used to
    follow. A rank that only left something out issues what follows at the line where it always does."""
    if _signature(one) in _since(other, others_rows) or _signature(other) in _since(one, rows):
        return True
    history = [(_signature(row), row.place) for row in rows if row.sequence < one.sequence]
    if one.place != other.place and (_signature(one), one.place) in history:
        return False
    usual = [_signature(row) for row in others_rows if row.sequence < other.sequence]
    return (_signature(other), _signature(one)) in pairwise(usual)


def _since(one: Collective, rows: Sequence[Collective]) -> set[_Signature]:
    return {_signature(row) for row in rows if row.sequence > one.sequence}


def _different_pairs(issued: Mapping[int, Collective], odd: Sequence[int]) -> Iterator[tuple[int, int]]:
    """An odd rank before one that it differs from."""
    for first in odd or issued:
        for second in issued:
            if _signature(issued[first]) != _signature(issued[second]):
                yield first, second
