"""Predicts the cost of collectives by algorithm, and the best bucket size for gradients.

The model is the usual one of latency and bandwidth (alpha and beta; gamma for the reduction): a message of n bytes
takes ``latency_s + n / bytes_per_s``. Inside a host every rank has a link of its own. Between hosts the link is the
*host's*, all its network cards together: messages that leave a host in the same round share it. A round lasts as long
as its slowest message. Invariant: figures follow from the rounds of ``collective_algorithms`` alone, so formulas and
counts cannot disagree.

For p ranks on one host, of an all-reduce of n bytes, with a = latency, b = 1 / rate, p' the largest power of two in p,
d = floor(log2 p), the depth of the tree:

* ring: 2 (p-1) a + 2 (p-1)/p n b (Patarasuk and Yuan 2009)
* halving-doubling: 2 log2(p') a + 2 (p'-1)/p' n b, and 2 (a + n b) more where p is no power of two (Thakur et al. 2005)
* tree in k chunks: 4 (d + k - 1) (a + n/k b); a little less where ranks of its last level have no sibling
* hierarchical, H hosts of g: 2 (g-1) (a + n/g b) inside, 2 (H-1) (a' + n/H b') between hosts

What leaves a host is 2 (p-1)/p n in a flat ring and 2 (H-1)/H n in a hierarchical one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from closeranks.facts.communication.collective_algorithms import (
    Algorithm,
    CommRound,
    Operation,
    Topology,
    comm_rounds,
    tree_level,
)

_MOST_CHUNKS = 1024
_KIB, _MIB = 1 << 10, 1 << 20
BUCKET_SIZES = tuple(256 * _KIB << doublings for doublings in range(9))
"""The bucket sizes that a search tries: 256 KiB to 64 MiB."""


@dataclass(frozen=True, slots=True)
class Link:
    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """The ranks and the links between them."""

    topology: Topology
    intra_host: Link
    """The link from a rank to another one of its host."""
    inter_host: Link | None = None
    """The link of a host to others, for all its ranks together; needed where there are several hosts."""
    add_bytes_per_s: float = math.inf
    """How fast a rank sums what it receives."""

    def __post_init__(self) -> None:
        if self.topology.hosts > 1 and self.inter_host is None:
            raise ValueError("several hosts need a link between them: give inter_host")

    @classmethod
    def flat(cls, num_ranks: int, link: Link) -> NetworkModel:
        """One level: every rank on a link of the same kind."""
        return cls(Topology(1, num_ranks), link)

    @property
    def slowest(self) -> Link:
        return self.inter_host if self.inter_host is not None and self.topology.hosts > 1 else self.intra_host


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """The cost of one collective. Where ranks or hosts differ, the figure of the busiest."""

    seconds: float = 0.0
    num_rounds: int = 0
    messages: int = 0
    """Messages that one rank sends."""
    sent_bytes: float = 0.0
    """Bytes that one rank sends."""
    inter_host_bytes: float = 0.0
    """Bytes that leave one host."""


def collective_cost(
    algorithm: Algorithm,
    num_bytes: float,
    network: NetworkModel,
    operation: Operation = "all-reduce",
    *,
    chunks: int = 0,
) -> CollectiveCost:
    """``chunks`` is the number of chunks in which a tree is pipelined; 0 takes the best number."""
    chunks = chunks or best_num_chunks(num_bytes, network)
    found = comm_rounds(algorithm, operation, num_bytes, network.topology, chunks=chunks)
    messages: Counter[int] = Counter()
    sent: dict[int, float] = {}
    left: dict[int, float] = {}
    for one in found:
        for source, target, size in one.sends:
            messages[source] += one.times
            sent[source] = sent.get(source, 0.0) + one.times * size
            host = network.topology.host_of(source)
            if host != network.topology.host_of(target):
                left[host] = left.get(host, 0.0) + one.times * size
    return CollectiveCost(
        seconds=sum(one.times * round_s(one, network) for one in found),
        num_rounds=sum(one.times for one in found),
        messages=max(messages.values(), default=0),
        sent_bytes=max(sent.values(), default=0.0),
        inter_host_bytes=max(left.values(), default=0.0),
    )


def round_s(one: CommRound, network: NetworkModel) -> float:
    """The time of its slowest message, where messages that leave or enter a host share the host's link."""
    topology = network.topology
    inside, leaving, entering = 0.0, dict[int, float](), dict[int, float]()
    for source, target, size in one.sends:
        here, there = topology.host_of(source), topology.host_of(target)
        if here == there:
            inside = max(inside, network.intra_host.seconds(size))
        else:
            leaving[here] = leaving.get(here, 0.0) + size
            entering[there] = entering.get(there, 0.0) + size
    busiest = max([*leaving.values(), *entering.values()], default=None)
    between = network.slowest.seconds(busiest) if busiest is not None else 0.0
    adding = max(send.num_bytes for send in one.sends) / network.add_bytes_per_s if one.reduces else 0.0
    return max(inside, between) + adding


def inter_host_bytes(
    algorithm: Algorithm, num_bytes: float, topology: Topology, operation: Operation = "all-reduce"
) -> float:
    """Bytes that leave the busiest host."""
    any_link = Link(0.0, 1.0)
    return collective_cost(
        algorithm, num_bytes, NetworkModel(topology, any_link, any_link), operation, chunks=1
    ).inter_host_bytes


def best_num_chunks(num_bytes: float, network: NetworkModel) -> int:
    """The k that minimizes 4 (d + k - 1) (a + n/k b): the square root of (d - 1) n b / a."""
    depth, link = tree_level(max(network.topology.num_ranks - 1, 0)), network.slowest
    if depth < 2 or num_bytes <= 0:
        return 1
    if link.latency_s <= 0:
        return _MOST_CHUNKS
    ideal = math.sqrt((depth - 1) * num_bytes / link.bytes_per_s / link.latency_s)
    return min(max(round(ideal), 1), _MOST_CHUNKS)


# --- which algorithm


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    algorithm: Algorithm
    cost: CollectiveCost
    why: str
    """One sentence for people."""


def candidate_algorithms(topology: Topology, operation: Operation = "all-reduce") -> tuple[Algorithm, ...]:
    """The applicable algorithms, the simplest first. With one host, or one rank on each, there is no hierarchical one;
    a tree supports all-reduce only."""
    found: list[Algorithm] = ["ring", "halving-doubling"]
    if topology.hosts > 1 and topology.per_host > 1:
        found.insert(1, "hierarchical")
    if operation == "all-reduce":
        found.append("tree")
    return tuple(found)


def fastest_algorithm(
    num_bytes: float, network: NetworkModel, operation: Operation = "all-reduce", among: Sequence[Algorithm] = ()
) -> AlgorithmChoice:
    """The fastest of ``among`` (if empty, of all applicable ones); on a tie, the first."""
    names = among or candidate_algorithms(network.topology, operation)
    costs = {name: collective_cost(name, num_bytes, network, operation) for name in names}
    best = min(costs, key=lambda name: costs[name].seconds)
    others = {name: one for name, one in costs.items() if name != best}
    if not others:
        return AlgorithmChoice(best, costs[best], f"{best}: the only option here")
    rival = "ring" if "ring" in others else min(others, key=lambda name: others[name].seconds)
    waits = [collective_cost(name, 0, network, operation).seconds for name in (rival, best)]
    why = _why(costs[best], rival, others[rival], num_bytes, waits[0] - waits[1])
    return AlgorithmChoice(best, costs[best], f"{best}: {why}")


def _why(
    best: CollectiveCost, rival: Algorithm, other: CollectiveCost, num_bytes: float, latency_saved_s: float
) -> str:
    """Why it is faster than the rival: fewer rounds where most of the saved time is latency, else fewer bytes."""
    seconds = f"about {_span(best.seconds)} instead of {_span(other.seconds)}"
    if best.num_rounds < other.num_rounds and 2 * latency_saved_s > other.seconds - best.seconds:
        return f"{best.num_rounds} rounds instead of {other.num_rounds}, {seconds}"
    if best.inter_host_bytes < other.inter_host_bytes:
        times = _times(best.inter_host_bytes / num_bytes, other.inter_host_bytes / num_bytes)
        return f"{times} of the gradients cross the link between hosts, {seconds}"
    if best.sent_bytes < other.sent_bytes:
        return f"a rank sends {_times(best.sent_bytes / num_bytes, other.sent_bytes / num_bytes)}, {seconds}"
    return f"{seconds} by {rival}"


def _times(ours: float, theirs: float) -> str:
    digits = 1 if f"{ours:.1f}" != f"{theirs:.1f}" else 2
    return f"{ours:.{digits}f}x instead of {theirs:.{digits}f}x"


def _span(seconds: float) -> str:
    if seconds < 0.9995e-3:
        return f"{1e6 * seconds:.0f} us"
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


# --- bucket size


def exposed_comm_s(bucket_bytes: float, total_bytes: float, backward_s: float, network: NetworkModel) -> float:
    """Exposed communication time: how long the reduction lasts beyond backward, in buckets of this size, by ring.

    Gradients become ready evenly over backward; a bucket starts when it is full and the one before is done. With k
    buckets that take t_i seconds each, the last is done after the maximum of r_i + t_i + ... + t_k, where r_i is the
    time at which bucket i is full. As r_i grows evenly and all but the last bucket are equal, the maximum is at the
    first, the last but one or the last i. Without a backward nothing overlaps, and a bucket costs its latency.
    """
    if total_bytes <= 0 or network.topology.num_ranks < 2:
        return 0.0
    num_full = math.ceil(total_bytes / bucket_bytes) - 1
    each_s = collective_cost("ring", bucket_bytes, network).seconds if num_full else 0.0
    last_s = collective_cost("ring", total_bytes - num_full * bucket_bytes, network).seconds
    ends = [backward_s + last_s]
    for place in (1, num_full) if num_full else ():
        ready_s = backward_s * place * bucket_bytes / total_bytes
        ends.append(ready_s + (num_full - place + 1) * each_s + last_s)
    return max(ends) - backward_s


def best_bucket_bytes(
    total_bytes: float, backward_s: float, network: NetworkModel, sizes: Sequence[int] = BUCKET_SIZES
) -> int:
    """The size, in bytes, with the least exposed time after backward; on a tie (to the nanosecond) the smallest.

    Small buckets leave little to reduce after the last gradient, large ones pay the latency less often.
    """
    return min(sorted(sizes), key=lambda size: round(exposed_comm_s(size, total_bytes, backward_s, network), 9))
