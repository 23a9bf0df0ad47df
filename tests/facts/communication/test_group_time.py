"""Closed forms of collectives, compared with the count of messages round by round."""

from __future__ import annotations

import pytest

from closeranks.facts.cluster import Cluster, parse_cluster
from closeranks.facts.communication.collective_algorithms import Topology
from closeranks.facts.communication.collective_cost import Link, NetworkModel, collective_cost
from closeranks.facts.communication.group_time import (
    AxisGroup,
    all_reduce_seconds,
    all_to_all_seconds,
    axis_group,
    gather_seconds,
    group_links,
    send_seconds,
)

CLUSTER = parse_cluster("64xh100")


def network(cluster: Cluster, hosts: int, per_host: int) -> NetworkModel:
    link = cluster.inter_host
    assert link is not None
    inside = Link(cluster.intra_host.latency_s, cluster.intra_host.effective_bytes_per_s)
    return NetworkModel(
        Topology(hosts, per_host), inside, Link(link.latency_s, cluster.inter_host_bytes_per_s * per_host)
    )


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_inside_a_host_it_is_the_ring(num_ranks: int) -> None:
    links = group_links(axis_group(num_ranks, 1, CLUSTER), CLUSTER)
    counted = collective_cost("ring", 1e9, network(CLUSTER, 1, num_ranks))
    assert all_reduce_seconds(1e9, links) == pytest.approx(counted.seconds)


def test_between_hosts_the_rounds_are_not_faster() -> None:
    """The closed form lets all cards of a host carry the ring, as NCCL's channels do; counted rounds use hierarchy."""
    links = group_links(axis_group(64, 1, CLUSTER), CLUSTER)
    counted = collective_cost("hierarchical", 1e9, network(CLUSTER, 8, 8), "all-gather")
    assert gather_seconds(1e9, links) <= counted.seconds
    assert gather_seconds(1e9, links) > 0.4 * counted.seconds


def test_ranks_that_share_a_host_with_others_have_their_share_of_the_cards() -> None:
    alone = group_links(axis_group(8, 8, CLUSTER), CLUSTER)
    assert alone.group == AxisGroup(8, 1)
    assert alone.bus_bytes_per_s == pytest.approx(CLUSTER.inter_host_bytes_per_s)


def test_small_messages_over_many_ranks_take_the_tree() -> None:
    big = parse_cluster("4096xh100")
    links = group_links(axis_group(4096, 1, big), big)
    assert all_reduce_seconds(1e4, links) < 0.1 * 2 * gather_seconds(1e4, links)


def test_nothing_to_do_takes_no_time() -> None:
    links = group_links(axis_group(1, 1, CLUSTER), CLUSTER)
    assert all_reduce_seconds(1e9, links) == gather_seconds(1e9, links) == all_to_all_seconds(1e9, links) == 0


def test_a_message_to_another_host_is_slower() -> None:
    assert send_seconds(1e8, 8, CLUSTER) > 5 * send_seconds(1e8, 1, CLUSTER)


@pytest.mark.parametrize(
    ("num_ranks", "num_bytes", "microseconds"),
    # NCCL on A100 (VIA-Research/vTrain, trace/a100): 48 and 256 MiB.
    [
        (2, 50331648, 313),
        (4, 50331648, 396),
        (8, 50331648, 439),
        (2, 268435456, 1456),
        (4, 268435456, 1929),
        (8, 268435456, 2162),
    ],
)
def test_all_reduces_of_a_host_take_what_was_measured(num_ranks: int, num_bytes: int, microseconds: float) -> None:
    host = parse_cluster("8xa100")
    found = all_reduce_seconds(num_bytes, group_links(axis_group(num_ranks, 1, host), host))
    assert found * 1e6 == pytest.approx(microseconds, rel=0.16 if num_ranks == 2 else 0.07)


def test_a_collective_starts_once() -> None:
    host = parse_cluster("8xa100")
    links = group_links(axis_group(8, 1, host), host)
    inside = host.intra_host
    moved = 2 * 7 / 8 * 1e9 / inside.effective_bytes_per_s
    assert inside.start_s > inside.latency_s > 0
    assert all_reduce_seconds(1e9, links) == pytest.approx(inside.start_s + 14 * inside.latency_s + moved)
