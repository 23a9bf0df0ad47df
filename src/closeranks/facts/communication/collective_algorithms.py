"""The messages of collective algorithms, round by round.

A round is a set of messages sent at the same time; in every round a rank sends at most one message and receives at most
one. Ranks are numbered host by host. Invariant: the rounds are a pure function of algorithm, operation, bytes and
topology, and shares are exact fractions of the bytes: rounding up to whole elements is not counted.

[Note: the algorithms] of n bytes over p ranks, p' the largest power of two in p, H hosts of g ranks:

* ring: p - 1 rounds of n/p to the next rank sum one share on every rank, p - 1 more pass the sums around (Patarasuk and
  Yuan 2009, who prove that no all-reduce sends less than its 2 (p-1)/p n bytes per rank).
* halving-doubling: partners exchange halves, then halves of halves, in log2 p' rounds; the all-gather doubles them
  (Thakur, Rabenseifner and Gropp 2005, after Rabenseifner). For the all-reduce near partners come first, so that far
  ones exchange the small parts; for a reduce-scatter far ones do, so that each rank ends with the share of its number.
  The remainder rule: of the first 2 (p - p') ranks every odd one sends its vector to the rank before it, takes no part,
  and receives the result at the end.
* tree: a binary heap of ranks with 0 at its root, pipelined in k chunks: children send up, left ones before right ones,
  each chunk as soon as it is summed, then the sums are sent down in the same way. k = 1 is the unpipelined tree.
* hierarchical: a ring reduce-scatter inside each host, a ring all-reduce among ranks of equal local index on all hosts,
  a ring all-gather inside each host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Operation = Literal["all-reduce", "reduce-scatter", "all-gather"]
Algorithm = Literal["ring", "halving-doubling", "tree", "hierarchical"]


@dataclass(frozen=True, slots=True)
class Topology:
    """Hosts with equally many ranks on each."""

    hosts: int
    per_host: int

    @property
    def num_ranks(self) -> int:
        return self.hosts * self.per_host

    def host_of(self, rank: int) -> int:
        return rank // self.per_host


class RoundMessage(NamedTuple):
    source: int
    target: int
    num_bytes: float


@dataclass(frozen=True, slots=True)
class CommRound:
    """Messages that are sent at the same time."""

    sends: tuple[RoundMessage, ...]
    times: int = 1
    """Number of consecutive rounds like this one."""
    reduces: bool = False
    """Whether received data is added to the rank's own."""


def comm_rounds(
    algorithm: Algorithm, operation: Operation, num_bytes: float, topology: Topology, *, chunks: int = 1
) -> tuple[CommRound, ...]:
    """``num_bytes`` is the whole vector: the input of a reduction, or the output of a gather. See the note above."""
    make: dict[str, Callable[[], Iterator[CommRound]]] = {
        "ring": lambda: _ring(operation, num_bytes, [range(topology.num_ranks)]),
        "halving-doubling": lambda: _halving_doubling(operation, num_bytes, topology.num_ranks),
        "tree": lambda: _tree(operation, num_bytes, topology.num_ranks, chunks),
        "hierarchical": lambda: _hierarchical(operation, num_bytes, topology),
    }
    return tuple(one for one in make[algorithm]() if one.times and one.sends)


def _ring(operation: Operation, num_bytes: float, rings: Sequence[Sequence[int]]) -> Iterator[CommRound]:
    """Rings of equally many ranks, all at the same time, each with a vector of its own."""
    size = len(rings[0])
    sends = tuple(
        RoundMessage(ring[at], ring[(at + 1) % size], num_bytes / size) for ring in rings for at in range(size)
    )
    if operation != "all-gather":
        yield CommRound(sends, size - 1, reduces=True)
    if operation != "reduce-scatter":
        yield CommRound(sends, size - 1)


def _hierarchical(operation: Operation, num_bytes: float, topology: Topology) -> Iterator[CommRound]:
    hosts, per_host = topology.hosts, topology.per_host
    inside = [range(host * per_host, (host + 1) * per_host) for host in range(hosts)]
    across = [range(place, topology.num_ranks, per_host) for place in range(per_host)]
    if operation != "all-gather":
        yield from _ring("reduce-scatter", num_bytes, inside)
    yield from _ring(operation, num_bytes / per_host, across)
    if operation != "reduce-scatter":
        yield from _ring("all-gather", num_bytes, inside)


class _Core:
    """The ranks that halve and double, and those that take no part: see the remainder rule."""

    def __init__(self, num_ranks: int) -> None:
        self.size = 1 << (num_ranks.bit_length() - 1)
        self.num_aside = num_ranks - self.size
        self.masks = [1 << bit for bit in range(self.size.bit_length() - 1)]

    def rank(self, core: int) -> int:
        return 2 * core if core < self.num_aside else core + self.num_aside

    def leave(self, num_bytes: float) -> tuple[RoundMessage, ...]:
        return tuple(RoundMessage(2 * core + 1, 2 * core, num_bytes) for core in range(self.num_aside))

    def come_back(self, num_bytes: float) -> tuple[RoundMessage, ...]:
        return tuple(RoundMessage(2 * core, 2 * core + 1, num_bytes) for core in range(self.num_aside))

    def shares(self, core: int, mask: int) -> int:
        """The number of ranks' shares in the aligned run of ``mask`` that contains ``core``: a rank that acts for two
        has two."""
        first = core // mask * mask
        return mask + min(max(self.num_aside - first, 0), mask)


def _halving_doubling(operation: Operation, num_bytes: float, num_ranks: int) -> Iterator[CommRound]:
    core, share = _Core(num_ranks), num_bytes / num_ranks
    if operation == "all-reduce":
        yield CommRound(core.leave(num_bytes), reduces=True)
        halves = [_exchange(core, mask, [num_bytes / (2 * mask)] * core.size) for mask in core.masks]
        yield from (CommRound(sends, reduces=True) for sends in halves)
        yield from (CommRound(sends) for sends in reversed(halves))
        yield CommRound(core.come_back(num_bytes))
    elif operation == "reduce-scatter":  # a rank that takes no part keeps its own share, and adds the others' sum to it
        yield CommRound(core.leave(num_bytes - share), reduces=True)
        for mask in reversed(core.masks):
            sizes = [share * core.shares(one ^ mask, mask) for one in range(core.size)]
            yield CommRound(_exchange(core, mask, sizes), reduces=True)
        yield CommRound(core.come_back(share), reduces=True)
    else:
        yield CommRound(core.leave(share))
        for mask in core.masks:
            sizes = [share * core.shares(one, mask) for one in range(core.size)]
            yield CommRound(_exchange(core, mask, sizes))
        yield CommRound(core.come_back(num_bytes - share))


def _exchange(core: _Core, mask: int, sizes: Sequence[float]) -> tuple[RoundMessage, ...]:
    return tuple(RoundMessage(core.rank(one), core.rank(one ^ mask), size) for one, size in enumerate(sizes))


def _tree(operation: Operation, num_bytes: float, num_ranks: int, chunks: int) -> Iterator[CommRound]:
    """A beat is two rounds, one for left children and one for right ones; each level runs one beat behind the previous
    one."""
    if operation != "all-reduce":
        raise ValueError(f"a tree gives every rank the whole: it is no way to {operation}")
    depth, size = num_ranks.bit_length() - 1, num_bytes / chunks
    for is_up in (True, False):
        beats = Counter(_busy_levels(beat, depth, chunks, is_up=is_up) for beat in range(depth + chunks - 1))
        for levels, times in beats.items():
            for side in (1, 0):  # left children have odd numbers
                children = [rank for rank in range(1, num_ranks) if rank % 2 == side and tree_level(rank) in levels]
                pairs = [(rank, (rank - 1) // 2) if is_up else ((rank - 1) // 2, rank) for rank in children]
                yield CommRound(tuple(RoundMessage(*pair, size) for pair in pairs), times, reduces=is_up)


def tree_level(rank: int) -> int:
    """The level of a rank in the tree; the root's is 0."""
    return (rank + 1).bit_length() - 1


def _busy_levels(beat: int, depth: int, chunks: int, *, is_up: bool) -> range:
    """The levels whose ranks pass a chunk in this beat: upwards the deepest level starts, downwards the first."""
    newest, oldest = beat, max(beat - chunks + 1, 0)
    if is_up:
        return range(max(depth - newest, 1), depth - oldest + 1)
    return range(oldest + 1, min(newest + 1, depth) + 1)
