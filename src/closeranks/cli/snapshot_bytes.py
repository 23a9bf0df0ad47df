"""Computes the host memory that snapshots of the state take under a layout.

Applies the two rules of a run: each rank keeps two copies of what it holds (``facts.memory.state_bytes``), and a peer
keeps two more of what no other rank holds (``elastic.backup_ranks``).
"""

from __future__ import annotations

from closeranks.elastic.backup_ranks import backup_ranks, images_of
from closeranks.facts.memory.state_bytes import snapshot_bytes
from closeranks.facts.mesh import Mesh
from closeranks.plan.layout_text import ByteUnit
from closeranks.plan.layouts import LayoutCost
from closeranks.run.job.job import Job

DEFAULT_WORKERS_PER_HOST = 8
"""Workers per host, if their number is not given."""
_MAX_PAIRED = 1024
"""Maximum ranks for which backup ranks are computed; with more, each is assumed to keep a copy for a peer."""


def workers_of_host(num_ranks: int, per_host: int) -> int:
    return per_host or min(num_ranks, DEFAULT_WORKERS_PER_HOST)


def hosts_of_ranks(num_ranks: int, per_host: int) -> list[int]:
    return [rank // workers_of_host(num_ranks, per_host) for rank in range(num_ranks)]


def snapshot_bytes_per_rank(job: Job, cost: LayoutCost, per_host: int) -> list[int]:
    """The bytes of all copies that each rank keeps."""
    mesh, num_ranks = Mesh(cost.layout), cost.layout.num_ranks
    held = [rank.state.parameters + rank.state.optimizer for rank in cost.ranks]
    own = [held[mesh.coordinate(rank).pipeline] for rank in range(num_ranks)]
    if not job.elastic.enabled:
        return [0] * num_ranks
    if job.elastic.second_copies == "off" or num_ranks == 1:
        return [snapshot_bytes(size) for size in own]
    hosts, images = hosts_of_ranks(num_ranks, per_host), images_of(mesh, are_own=job.sync.compress.name != "none")
    if num_ranks > _MAX_PAIRED:
        hosts_of_image: dict[str, set[int]] = {}
        for host, image in zip(hosts, images, strict=True):
            hosts_of_image.setdefault(image, set()).add(host)
        peer_bytes = 0 if all(len(image_hosts) > 1 for image_hosts in hosts_of_image.values()) else max(held)
        return [snapshot_bytes(size, peer_bytes) for size in own]
    for_peer = [0] * num_ranks
    for rank, backup in enumerate(backup_ranks(hosts, images)):
        if backup is not None:
            for_peer[backup] = own[rank]
    return [snapshot_bytes(mine, kept) for mine, kept in zip(own, for_peer, strict=True)]


def snapshot_memory_line(job: Job, cost: LayoutCost, per_host: int) -> str:
    """``copies in host memory: 9.54 MiB a rank, 38.2 MiB a host of 4 workers, ...``"""
    if not job.elastic.enabled:
        return "copies in host memory: none (elastic.enabled = false)"
    copies, num_ranks = snapshot_bytes_per_rank(job, cost, per_host), cost.layout.num_ranks
    num_local = workers_of_host(num_ranks, per_host)
    hosts = [sum(copies[first : first + num_local]) for first in range(0, num_ranks, num_local)]
    without_peers = sum(snapshot_bytes(rank.state.parameters + rank.state.optimizer) for rank in cost.ranks)
    has_peers = sum(copies) > without_peers * num_ranks // len(cost.ranks)
    byte_unit = ByteUnit.for_largest(max(hosts))
    what = "two of what a rank holds" + (" and two of a peer's" if has_peers else "")
    workers = f"{num_local} worker{'' if num_local == 1 else 's'}"
    hint = "" if per_host or num_ranks <= num_local else "; --per-host changes that"
    sizes = (
        f"{byte_unit.text(max(copies))} {byte_unit.name} a rank, "
        f"{byte_unit.text(max(hosts))} {byte_unit.name} a host of {workers}"
    )
    return f"copies in host memory: {sizes} ({what}{hint})"
