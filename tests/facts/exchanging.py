"""Reductions played out on small vectors: every message is a real list of numbers, counted as it is sent.

Written from the descriptions in the papers, not from ``facts.communication``: ranks know their own vector and what
arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

Vector = list[int]
Message = tuple[int, int, list[int], Vector]
"""From, to, places in the vector, values."""


@dataclass
class Wire:
    """Carries rounds of messages between ranks and counts elements."""

    vectors: list[Vector]
    per_host: int
    num_rounds: int = 0
    messages: Counter[int] = field(default_factory=Counter)
    sent: Counter[int] = field(default_factory=Counter)
    left: Counter[int] = field(default_factory=Counter)

    def take(self, rank: int, to: int, places: Iterable[int]) -> Message:
        listed = list(places)
        return rank, to, listed, [self.vectors[rank][place] for place in listed]

    def carry(self, messages: list[Message], *, add: bool) -> None:
        """All at once: what is sent was read before anything arrives, and nobody sends or receives two at a time."""
        if not messages:
            return
        self.num_rounds += 1
        assert len({one[0] for one in messages}) == len({one[1] for one in messages}) == len(messages)
        for source, target, places, values in messages:
            self.messages[source] += 1
            self.sent[source] += len(values)
            if source // self.per_host != target // self.per_host:
                self.left[source // self.per_host] += len(values)
            for place, value in zip(places, values, strict=True):
                self.vectors[target][place] = value + (self.vectors[target][place] if add else 0)

    @property
    def counts(self) -> tuple[int, ...]:
        """Rounds; messages and elements of the busiest rank; elements that leave the busiest host."""
        return self.num_rounds, *(max(one.values(), default=0) for one in (self.messages, self.sent, self.left))


def share(number: int, of: int, places: range) -> range:
    """The ``number``-th of ``of`` nearly equal parts."""
    size = len(places)
    return places[size * number // of : size * (number + 1) // of]


# --- rings


def ring_scatter(wire: Wire, rings: list[tuple[list[int], range]]) -> None:
    """The rank at place i ends with the sum of part i."""
    size = len(rings[0][0])
    for step in range(size - 1):
        wire.carry([
            wire.take(ring[at], ring[(at + 1) % size], share((at - step - 1) % size, size, part))
            for ring, part in rings for at in range(size)
        ], add=True)  # fmt: skip


def ring_gather(wire: Wire, rings: list[tuple[list[int], range]]) -> None:
    size = len(rings[0][0])
    for step in range(size - 1):
        wire.carry([
            wire.take(ring[at], ring[(at + 1) % size], share((at - step) % size, size, part))
            for ring, part in rings for at in range(size)
        ], add=False)  # fmt: skip


def whole(wire: Wire) -> range:
    return range(len(wire.vectors[0]))


def ring(wire: Wire, operation: str) -> None:
    rings = [(list(range(len(wire.vectors))), whole(wire))]
    if operation != "all-gather":
        ring_scatter(wire, rings)
    if operation != "reduce-scatter":
        ring_gather(wire, rings)


def hierarchical(wire: Wire, operation: str) -> None:
    """Place i of a host has part i of the vector, and host h part h of that."""
    per_host, num_ranks = wire.per_host, len(wire.vectors)
    inside = [(list(range(first, first + per_host)), whole(wire)) for first in range(0, num_ranks, per_host)]
    across = [
        (list(range(place, num_ranks, per_host)), share(place, per_host, whole(wire))) for place in range(per_host)
    ]
    if operation != "all-gather":
        ring_scatter(wire, inside)
        ring_scatter(wire, across)
    if operation != "reduce-scatter":
        ring_gather(wire, across)
        ring_gather(wire, inside)


def part_in_hierarchy(rank: int, per_host: int, hosts: int, places: range) -> range:
    return share(rank // per_host, hosts, share(rank % per_host, per_host, places))


# --- halving and doubling


def core_of(num_ranks: int) -> tuple[list[int], dict[int, int]]:
    """The power of two of ranks that take part, and who stands for whom: an even rank for the odd one after it."""
    size = 1
    while 2 * size <= num_ranks:
        size *= 2
    aside = {2 * pair: 2 * pair + 1 for pair in range(num_ranks - size)}
    return [rank for rank in range(num_ranks) if rank not in aside.values()], aside


def halving_doubling(wire: Wire, operation: str) -> None:
    {"all-reduce": _reduce_all, "reduce-scatter": _reduce_halves, "all-gather": _gather_doubles}[operation](wire)


def _reduce_all(wire: Wire) -> None:
    core, aside = core_of(len(wire.vectors))
    wire.carry([wire.take(odd, even, whole(wire)) for even, odd in aside.items()], add=True)
    mine = [whole(wire)] * len(core)
    trail: list[tuple[int, list[range]]] = []
    distance = 1
    while distance < len(core):
        trail.append((distance, mine))
        halves = [[share(bit, 2, part) for bit in (0, 1)] for part in mine]
        bits = [bool(at & distance) for at in range(len(core))]
        wire.carry(
            [wire.take(core[at], core[at ^ distance], halves[at][not bits[at]]) for at in range(len(core))], add=True
        )
        mine = [halves[at][bits[at]] for at in range(len(core))]
        distance *= 2
    for back, before in reversed(trail):
        wire.carry([wire.take(core[at], core[at ^ back], mine[at]) for at in range(len(core))], add=False)
        mine = before
    wire.carry([wire.take(even, odd, whole(wire)) for even, odd in aside.items()], add=False)


def _parts(wire: Wire, core: list[int], aside: dict[int, int], members: Iterable[int]) -> list[int]:
    """The shares of these of the core, and of those they stand for."""
    ranks = [rank for at in members for rank in (core[at], aside.get(core[at])) if rank is not None]
    return [place for rank in ranks for place in share(rank, len(wire.vectors), whole(wire))]


def _reduce_halves(wire: Wire) -> None:
    core, aside = core_of(len(wire.vectors))
    num_ranks = len(wire.vectors)
    own = {odd: set(share(odd, num_ranks, whole(wire))) for odd in aside.values()}
    wire.carry(
        [wire.take(odd, even, (at for at in whole(wire) if at not in own[odd])) for even, odd in aside.items()],
        add=True,
    )
    groups = [range(len(core))] * len(core)
    while len(groups[0]) > 1:
        half = len(groups[0]) // 2
        low_high = [(group[:half], group[half:]) for group in groups]
        is_high = [at in low_high[at][1] for at in range(len(core))]
        sends = []
        for at in range(len(core)):
            partner = at - half if is_high[at] else at + half
            sends.append(wire.take(core[at], core[partner], _parts(wire, core, aside, low_high[at][not is_high[at]])))
        wire.carry(sends, add=True)
        groups = [low_high[at][is_high[at]] for at in range(len(core))]
    wire.carry([wire.take(even, odd, sorted(own[odd])) for even, odd in aside.items()], add=True)


def _gather_doubles(wire: Wire) -> None:
    core, aside = core_of(len(wire.vectors))
    num_ranks = len(wire.vectors)
    own = {odd: set(share(odd, num_ranks, whole(wire))) for odd in aside.values()}
    wire.carry([wire.take(odd, even, sorted(own[odd])) for even, odd in aside.items()], add=False)
    distance = 1
    while distance < len(core):
        firsts = [at // distance * distance for at in range(len(core))]
        held = [_parts(wire, core, aside, range(first, first + distance)) for first in firsts]
        wire.carry([wire.take(core[at], core[at ^ distance], held[at]) for at in range(len(core))], add=False)
        distance *= 2
    wire.carry(
        [wire.take(even, odd, (at for at in whole(wire) if at not in own[odd])) for even, odd in aside.items()],
        add=False,
    )


# --- trees


def tree(wire: Wire, chunks: int) -> None:
    """Each rank sends a chunk up once all its children's have arrived, and down once it has it; in every beat first the
    left children are served, then the right ones. Chunks leave in order, one a beat."""
    num_ranks = len(wire.vectors)
    parts = [share(number, chunks, whole(wire)) for number in range(chunks)]
    children = [[child for child in (2 * rank + 1, 2 * rank + 2) if child < num_ranks] for rank in range(num_ranks)]
    depth = num_ranks.bit_length() - 1
    arrived = [[0] * chunks for _ in range(num_ranks)]
    passed = [0] * num_ranks
    while any(passed[rank] < chunks for rank in range(1, num_ranks)):
        ready = [
            rank for rank in range(1, num_ranks)
            if passed[rank] < chunks and arrived[rank][passed[rank]] == len(children[rank])
            and _is_due(rank, depth, passed, num_ranks)
        ]  # fmt: skip
        for side in (1, 0):
            senders = [rank for rank in ready if rank % 2 == side]
            wire.carry([wire.take(rank, (rank - 1) // 2, parts[passed[rank]]) for rank in senders], add=True)
        for rank in ready:
            arrived[(rank - 1) // 2][passed[rank]] += 1
            passed[rank] += 1
    got = [chunks if rank == 0 else 0 for rank in range(num_ranks)]
    while any(got[rank] < chunks for rank in range(num_ranks)):
        ready = [rank for rank in range(1, num_ranks) if got[rank] < got[(rank - 1) // 2]]
        for side in (1, 0):
            takers = [rank for rank in ready if rank % 2 == side]
            wire.carry([wire.take((rank - 1) // 2, rank, parts[got[rank]]) for rank in takers], add=False)
        for rank in ready:
            got[rank] += 1


def _is_due(rank: int, depth: int, passed: list[int], num_ranks: int) -> bool:
    """A leaf above the last level keeps pace with the leaves of the last one."""
    level = (rank + 1).bit_length() - 1
    deeper = [passed[other] for other in range(1, num_ranks) if (other + 1).bit_length() - 1 == level + 1]
    return level == depth or not deeper or min(deeper) > passed[rank]
