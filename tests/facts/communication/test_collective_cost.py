"""What reductions cost: every figure against the algorithm played out on vectors, and against the papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.facts.communication.collective_algorithms import Algorithm, Operation, Topology
from closeranks.facts.communication.collective_cost import (
    BUCKET_SIZES,
    CollectiveCost,
    Link,
    NetworkModel,
    best_bucket_bytes,
    best_num_chunks,
    candidate_algorithms,
    collective_cost,
    exposed_comm_s,
    fastest_algorithm,
    inter_host_bytes,
)
from tests.facts import exchanging
from tests.facts.exchanging import Wire, part_in_hierarchy, share

OPERATIONS: tuple[Operation, ...] = ("all-reduce", "reduce-scatter", "all-gather")
NVLINK, ETHERNET = Link(3e-6, 300e9), Link(30e-6, 12.5e9)
MIB = 1 << 20

topologies = st.builds(Topology, st.integers(1, 5), st.integers(1, 5))
operations = st.sampled_from(OPERATIONS)


def start(
    operation: str, num_ranks: int, numel: int, owns: Callable[[int], range]
) -> tuple[list[list[int]], list[int]]:
    """The vectors before, and what is to come out."""
    full = [[(7 * rank + 3) * (place + 1) for place in range(numel)] for rank in range(num_ranks)]
    if operation != "all-gather":
        return full, [sum(column) for column in zip(*full, strict=True)]
    told = [0] * numel
    vectors = [[0] * numel for _ in range(num_ranks)]
    for rank in range(num_ranks):
        for place in owns(rank):
            vectors[rank][place] = told[place] = full[rank][place]
    return vectors, told


def play(algorithm: str, operation: str, topology: Topology, numel: int, chunks: int = 1) -> Wire:
    """Played out, with the sums checked."""
    hosts, per_host, num_ranks = topology.hosts, topology.per_host, topology.num_ranks

    def owns(rank: int) -> range:
        if algorithm == "hierarchical":
            return part_in_hierarchy(rank, per_host, hosts, range(numel))
        return share(rank, num_ranks, range(numel))

    vectors, expected = start(operation, num_ranks, numel, owns)
    wire = Wire(vectors, per_host)
    match algorithm:
        case "ring":
            exchanging.ring(wire, operation)
        case "hierarchical":
            exchanging.hierarchical(wire, operation)
        case "halving-doubling":
            exchanging.halving_doubling(wire, operation)
        case "tree":
            exchanging.tree(wire, chunks)
    for rank, vector in enumerate(wire.vectors):
        places = owns(rank) if operation == "reduce-scatter" else range(numel)
        assert [vector[place] for place in places] == [expected[place] for place in places], f"rank {rank}"
    return wire


def counts(found: CollectiveCost) -> tuple[object, ...]:
    return found.num_rounds, found.messages, pytest.approx(found.sent_bytes), pytest.approx(found.inter_host_bytes)


def network(topology: Topology) -> NetworkModel:
    return NetworkModel(topology, NVLINK, ETHERNET)


@given(topologies, operations, st.integers(1, 3), st.sampled_from(["ring", "hierarchical", "halving-doubling"]))
def test_rounds_messages_and_bytes_are_those_of_the_algorithm(
    topology: Topology, operation: Operation, times: int, algorithm: Algorithm
) -> None:
    numel = times * math.lcm(topology.num_ranks, 16)  # so that every share is whole
    wire = play(algorithm, operation, topology, numel)
    assert wire.counts == counts(collective_cost(algorithm, numel, network(topology), operation))


@given(topologies, st.integers(1, 6), st.integers(1, 3))
def test_a_tree_in_chunks(topology: Topology, chunks: int, times: int) -> None:
    numel = times * chunks
    wire = play("tree", "all-reduce", topology, numel, chunks)
    assert wire.counts == counts(collective_cost("tree", numel, network(topology), chunks=chunks))


@given(topologies, operations, st.integers(1, 40), st.sampled_from(["ring", "hierarchical", "halving-doubling"]))
def test_vectors_that_do_not_divide_cost_about_the_same(
    topology: Topology, operation: Operation, numel: int, algorithm: Algorithm
) -> None:
    """A message is at most an element longer or shorter than its fraction for each share it is made of."""
    rounds, messages, sent, across = play(algorithm, operation, topology, numel).counts
    found = collective_cost(algorithm, numel, network(topology), operation)
    slack = rounds * topology.num_ranks
    assert (rounds, messages) == (found.num_rounds, found.messages)
    assert abs(sent - found.sent_bytes) <= slack
    assert abs(across - found.inter_host_bytes) <= slack * topology.per_host


# --- the formulas


@given(st.integers(2, 130), st.integers(1, 1 << 30))
def test_the_formulas_of_the_papers_on_one_host(p: int, n: int) -> None:
    link = Link(5e-6, 10e9)
    a, b, flat = link.latency_s, 1 / link.bytes_per_s, NetworkModel.flat(p, link)
    assert collective_cost("ring", n, flat).seconds == pytest.approx(2 * (p - 1) * a + 2 * (p - 1) / p * n * b)
    core = 1 << (p.bit_length() - 1)
    remainder = 2 * (a + n * b) if core < p else 0.0
    halving = 2 * math.log2(core) * a + 2 * (core - 1) / core * n * b + remainder
    assert collective_cost("halving-doubling", n, flat).seconds == pytest.approx(halving)
    assert collective_cost("ring", n, flat, "reduce-scatter").sent_bytes == pytest.approx((p - 1) / p * n)
    assert collective_cost("halving-doubling", n, flat, "reduce-scatter").sent_bytes == pytest.approx((p - 1) / p * n)


@given(st.integers(3, 130), st.integers(1, 1 << 30), st.integers(1, 50))
def test_the_formula_of_the_tree(p: int, n: int, k: int) -> None:
    link, depth = Link(5e-6, 10e9), p.bit_length() - 1
    bound = 4 * (depth + k - 1) * link.seconds(n / k)
    found = collective_cost("tree", n, NetworkModel.flat(p, link), chunks=k).seconds
    assert found <= bound * (1 + 1e-9)
    if p - (1 << depth) >= 2:  # its last level has a right child
        assert found == pytest.approx(bound)


@given(topologies, st.integers(1, 1 << 30))
def test_what_leaves_a_host(topology: Topology, n: int) -> None:
    hosts, p = topology.hosts, topology.num_ranks
    flat = 2 * (p - 1) / p * n if hosts > 1 else 0
    assert inter_host_bytes("ring", n, topology) == pytest.approx(flat)
    assert inter_host_bytes("hierarchical", n, topology) == pytest.approx(2 * (hosts - 1) / hosts * n)


def test_the_time_of_a_hierarchy_is_that_of_its_three_parts() -> None:
    n, net = 64 * MIB, network(Topology(4, 8))
    inside = 2 * 7 * NVLINK.seconds(n / 8)
    between = 2 * 3 * ETHERNET.seconds(n / 4)  # eight ranks of a host share its link
    assert collective_cost("hierarchical", n, net).seconds == pytest.approx(inside + between)


def test_adding_up_costs_what_arrives() -> None:
    n, plain = 8e6, NetworkModel.flat(4, NVLINK)
    slow = NetworkModel(plain.topology, NVLINK, add_bytes_per_s=1e9)
    assert collective_cost("ring", n, slow).seconds - collective_cost("ring", n, plain).seconds == pytest.approx(
        3 / 4 * n / 1e9
    )
    assert collective_cost("ring", n, slow, "all-gather") == collective_cost("ring", n, plain, "all-gather")


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving-doubling", "hierarchical"])
def test_one_rank_has_nobody_to_wait_for(algorithm: Algorithm) -> None:
    assert collective_cost(algorithm, 1000, NetworkModel.flat(1, NVLINK)) == CollectiveCost()


@given(st.integers(2, 40), st.integers(1, 1 << 28))
def test_the_chosen_chunks_are_about_the_best(p: int, n: int) -> None:
    flat = NetworkModel.flat(p, ETHERNET)
    seconds = {k: collective_cost("tree", n, flat, chunks=k).seconds for k in (1, 2, 5, 20, 100, 400, 1024)}
    assert collective_cost("tree", n, flat, chunks=best_num_chunks(n, flat)).seconds <= 1.25 * min(seconds.values())


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="give inter_host"):
        NetworkModel(Topology(2, 2), NVLINK)
    with pytest.raises(ValueError, match="no way to all-gather"):
        collective_cost("tree", 8, network(Topology(1, 4)), "all-gather")


# --- which one


def test_between_hosts_the_hierarchy_is_chosen_and_says_why() -> None:
    net = NetworkModel(Topology(2, 2), Link(20e-6, 3e9), Link(100e-6, 1.25e9))
    chosen = fastest_algorithm(100e6, net, among=("ring", "hierarchical"))
    assert chosen.algorithm == "hierarchical"
    assert chosen.why == (
        "hierarchical: 1.0x instead of 1.5x of the gradients cross the link between hosts, "
        "about 114 ms instead of 121 ms"
    )


def test_the_reason_is_what_saves_most() -> None:
    """On many hosts a hierarchy sends hardly less than a ring; a small vector gains by its few rounds all the same."""
    among: tuple[Algorithm, ...] = ("ring", "hierarchical")
    net = network(Topology(16, 8))
    assert (
        fastest_algorithm(1e6, net, among=among).why
        == "hierarchical: 44 rounds instead of 254, about 1.1 ms instead of 7.78 ms"
    )
    quick = NetworkModel(net.topology, NVLINK, Link(5e-6, 400e9))  # a ring uses both links at once, a hierarchy in turn
    assert fastest_algorithm(1e12, quick, among=among).why == "ring: about 6.62 s instead of 10.5 s by hierarchical"
    slow = NetworkModel(net.topology, NVLINK, Link(30e-6, 1e9))
    assert "1.9x instead of 2.0x of the gradients cross" in fastest_algorithm(1e12, slow, among=among).why


def test_small_vectors_go_in_few_rounds_and_large_ones_in_small_shares() -> None:
    flat = NetworkModel.flat(16, ETHERNET)
    assert fastest_algorithm(100, flat).why.startswith("halving-doubling: 8 rounds instead of 30")
    twelve = NetworkModel.flat(12, ETHERNET)
    assert fastest_algorithm(1e9, twelve).algorithm == "ring", "a remainder sends the whole vector twice more"
    assert fastest_algorithm(1e9, twelve).why == (
        "ring: a rank sends 1.8x instead of 2.8x, about 147 ms instead of 300 ms"
    )


@given(topologies.filter(lambda one: one.num_ranks > 1), st.integers(1, 1 << 28), operations)
def test_nothing_is_cheaper_than_the_cheapest(topology: Topology, n: int, operation: Operation) -> None:
    net = network(topology)
    chosen = fastest_algorithm(n, net, operation)
    names = candidate_algorithms(topology, operation)
    assert chosen.cost.seconds == min(collective_cost(name, n, net, operation).seconds for name in names)
    assert chosen.why.startswith(f"{chosen.algorithm}: ")
    assert ("hierarchical" in names) == (topology.hosts > 1 and topology.per_host > 1)


def test_where_there_is_one_way_it_says_so() -> None:
    assert fastest_algorithm(8, NetworkModel.flat(2, NVLINK), among=("ring",)).why == "ring: the only option here"


# --- buckets


def played_s(bucket: int, total: int, backward_s: float, net: NetworkModel) -> float:
    """Buckets one after the other, on a clock."""
    clock = filled = 0.0
    while filled < total:
        size = min(bucket, total - filled)
        filled += size
        clock = max(clock, backward_s * filled / total) + collective_cost("ring", size, net).seconds
    return clock - backward_s


@given(st.sampled_from(BUCKET_SIZES), st.integers(1, 300 * MIB), st.floats(0, 1), st.integers(2, 9))
def test_what_is_left_after_backward_is_what_a_clock_says(bucket: int, total: int, backward_s: float, p: int) -> None:
    net = NetworkModel.flat(p, Link(200e-6, 1e9))
    assert exposed_comm_s(bucket, total, backward_s, net) == pytest.approx(played_s(bucket, total, backward_s, net))


@given(st.integers(1, 300 * MIB), st.floats(0, 1), st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
def test_no_other_size_leaves_less(total: int, backward_s: float, latency_s: float, rate: float) -> None:
    net = NetworkModel.flat(4, Link(latency_s, rate))
    best = best_bucket_bytes(total, backward_s, net)
    assert best in BUCKET_SIZES
    least = exposed_comm_s(best, total, backward_s, net)
    assert all(least <= exposed_comm_s(size, total, backward_s, net) + 1e-9 for size in BUCKET_SIZES)


def test_latency_asks_for_large_buckets_and_overlap_for_small_ones() -> None:
    quick, tardy = (NetworkModel.flat(2, Link(latency_s, 1e9)) for latency_s in (10e-6, 5e-3))
    assert best_bucket_bytes(200 * MIB, 0.0, quick) == 64 * MIB, "nothing to hide behind: each bucket is a latency"
    assert best_bucket_bytes(200 * MIB, 1.0, quick) == 256 << 10, "hidden all but the last"
    assert best_bucket_bytes(200 * MIB, 1.0, tardy) > 256 << 10
    assert best_bucket_bytes(300 << 10, 0.0, quick) == 512 << 10, "the smallest that holds all of it"
    assert best_bucket_bytes(200 * MIB, 1.0, NetworkModel.flat(1, Link(1.0, 1.0))) == BUCKET_SIZES[0]
