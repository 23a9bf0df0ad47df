"""How long does a collective of a group of ranks take on a cluster? Closed forms, for planning thousands of layouts.

A group has ``per_host`` ranks on each of its hosts, and the other ranks of a host form groups of their own, which use
the network cards at the same time: each rank has its share of them. Algorithms as in ``collective_cost``, which counts
messages round by round: ring, hierarchical, and a double binary tree for all-reduce; the fastest is taken, as NCCL
does. Invariant: a group of one rank takes no time, and no collective is faster than its bytes on its slowest link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from closeranks.facts.calibration import Calibration
from closeranks.facts.cluster import Cluster
from closeranks.facts.device_table import FabricLink


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """Ranks of one axis."""

    num_ranks: int
    per_host: int
    """On each host, or domain of the fast link; ``num_ranks`` if all are on one."""

    @property
    def num_hosts(self) -> int:
        return -(-self.num_ranks // self.per_host)


def axis_group(num_ranks: int, stride: int, cluster: Cluster) -> AxisGroup:
    """The group of an axis whose neighbours are ``stride`` ranks apart."""
    per_host = max(1, min(num_ranks, cluster.domain_size // max(stride, 1)))
    return AxisGroup(num_ranks, per_host)


@dataclass(frozen=True, slots=True)
class GroupLinks:
    """The links of a group, with efficiency: those inside a host, and the share of the network cards of one rank."""

    group: AxisGroup
    inside: FabricLink
    between_latency_s: float
    between_bytes_per_s: float
    """Of one rank."""
    calibration: Calibration | None = None
    """Measured between the ranks of one host,"""
    num_workers: int = 0
    """on which so many workers communicate."""

    def measured_s(self, operation: str, num_bytes: float) -> float | None:
        """None for a group of several hosts, and for what was not measured."""
        if self.calibration is None or self.group.num_hosts > 1:
            return None
        return self.calibration.collective_s(operation, self.group.num_ranks, num_bytes, self.num_workers)

    @property
    def bus_bytes_per_s(self) -> float:
        """Of a ring over all ranks: on every host it leaves over the cards of all its ranks at once."""
        if self.group.num_hosts == 1:
            return self.inside.effective_bytes_per_s
        across = self.between_bytes_per_s * self.group.per_host
        return min(self.inside.effective_bytes_per_s, across) if self.group.per_host > 1 else across

    @property
    def ring_latency_s(self) -> float:
        """Of one pass around the ring, without the start."""
        hosts, ranks = self.group.num_hosts, self.group.num_ranks
        if hosts == 1:
            return (ranks - 1) * self.inside.latency_s
        return (hosts - 1) * self.between_latency_s + (ranks - hosts) * self.inside.latency_s


def group_links(group: AxisGroup, cluster: Cluster) -> GroupLinks:
    link = cluster.inter_host or cluster.intra_host
    between = (link.latency_s, cluster.inter_host_bytes_per_s)
    return GroupLinks(group, cluster.intra_host, *between, cluster.calibration, cluster.devices_on_host)


def over_one_card(links: GroupLinks) -> GroupLinks:
    """The links of a library whose ring leaves each host over one card, however many ranks of the group are on it."""
    return replace(links, group=replace(links.group, per_host=1)) if links.group.num_hosts > 1 else links


def gather_seconds(num_bytes: float, links: GroupLinks) -> float:
    """An all-gather whose output has this many bytes."""
    return _one_way_seconds("all-gather", num_bytes, links)


def scatter_seconds(num_bytes: float, links: GroupLinks) -> float:
    """A reduce-scatter whose input has this many bytes: it sends what a gather sends, but Gloo sends more."""
    return _one_way_seconds("reduce-scatter", num_bytes, links)


def _one_way_seconds(operation: str, num_bytes: float, links: GroupLinks) -> float:
    ranks, hosts, per_host = links.group.num_ranks, links.group.num_hosts, links.group.per_host
    if ranks == 1 or num_bytes <= 0:
        return 0.0
    if (measured := links.measured_s(operation, num_bytes)) is not None:
        return measured
    start_s = links.inside.start_s
    ring = links.ring_latency_s + (ranks - 1) / ranks * num_bytes / links.bus_bytes_per_s
    if hosts == 1 or per_host == 1:
        return start_s + ring
    between = (hosts - 1) / hosts * num_bytes / per_host / links.between_bytes_per_s
    inside = (per_host - 1) / per_host * num_bytes / links.inside.effective_bytes_per_s
    latency = (hosts - 1) * links.between_latency_s + (per_host - 1) * links.inside.latency_s
    return start_s + min(ring, latency + between + inside)


def all_reduce_seconds(num_bytes: float, links: GroupLinks) -> float:
    ranks = links.group.num_ranks
    if ranks == 1 or num_bytes <= 0:
        return 0.0
    if (measured := links.measured_s("all-reduce", num_bytes)) is not None:
        return measured
    hop = links.between_latency_s if links.group.num_hosts > 1 else links.inside.latency_s
    start_s = links.inside.start_s
    tree = start_s + 2 * math.log2(ranks) * hop + 2 * num_bytes / links.bus_bytes_per_s
    return min(gather_seconds(num_bytes, links) + scatter_seconds(num_bytes, links) - start_s, tree)


def all_to_all_seconds(num_bytes: float, links: GroupLinks, copies: int = 1) -> float:
    """Every rank holds this many bytes, and sends an equal part of them to each rank.

    With ``copies``, each datum is among the bytes so many times, for random ranks: a host receives it once and passes
    it on inside.
    """
    ranks, per_host, hosts = links.group.num_ranks, links.group.per_host, links.group.num_hosts
    if ranks == 1 or num_bytes <= 0:
        return 0.0
    distinct = hosts * (1 - (1 - 1 / hosts) ** copies) / copies if hosts > 1 else 1.0
    away = (ranks - per_host) / ranks * distinct * num_bytes / links.between_bytes_per_s
    near = (ranks - 1) / ranks * num_bytes / links.inside.effective_bytes_per_s if per_host > 1 else 0.0
    return links.inside.start_s + links.ring_latency_s / max(1, math.log2(ranks)) + max(away, near)


def send_seconds(num_bytes: float, stride: int, cluster: Cluster) -> float:
    """A message to the rank ``stride`` further; the slowest of the ranks that send at once."""
    if stride < cluster.domain_size or cluster.inter_host is None:
        known, workers = cluster.calibration, cluster.devices_on_host
        if known and (measured := known.collective_s("send", 2, num_bytes, workers)) is not None:
            return measured
        return cluster.intra_host.latency_s + num_bytes / cluster.intra_host.effective_bytes_per_s
    return cluster.inter_host.latency_s + num_bytes / cluster.inter_host_bytes_per_s
