"""Decides which ranks hold the same state, and which rank keeps a second copy of it.

An image is everything that one rank holds of the state. Data-parallel replicas hold the same image, so it is named by
the coordinates on the other mesh axes; under Local SGD and DiLoCo each replica has its own. Invariants: all functions
are pure, and every rank computes the same answer from the same world; no rank keeps more than one copy for another,
since its snapshot memory has room for one; a copy is placed on another host if any has room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from closeranks.facts.layout import Layout
from closeranks.facts.mesh import Mesh, MeshCoordinate


def images_of(mesh: Mesh, *, are_own: bool = False) -> tuple[str, ...]:
    """The image of every rank; ``are_own``: replicas hold different values of something, so each has its own image."""
    return tuple(_image(mesh, mesh.coordinate(rank), are_own) for rank in range(mesh.layout.num_ranks))


def _image(mesh: Mesh, at: MeshCoordinate, is_own: bool) -> str:
    group = f"h{mesh.replica_group(at)}-" if mesh.num_replica_groups > 1 else ""
    return f"{group}{f'r{at.replica}-' if is_own else ''}p{at.pipeline}-s{at.shard}-t{at.tensor}"


def layout_digest(layout: Layout) -> str:
    """A digest of the layout; equal if images of the same name hold the same tensors."""
    return blake2b(str(layout).encode(), digest_size=8).hexdigest()


def backup_ranks(hosts: Sequence[int], images: Sequence[str]) -> tuple[int | None, ...]:
    """The rank that keeps a copy of each rank's image; None if a replica suffices or no rank is free.

    An image needs no copy if it has replicas on several hosts or, in a job on a single host, a replica at all. For an
    image that does need one, the copy belongs to the first of its holders.
    """
    are_several = len(set(hosts)) > 1
    writers = []
    for image in dict.fromkeys(images):
        holders = [rank for rank, other in enumerate(images) if other == image]
        is_safe = len({hosts[rank] for rank in holders}) > 1 if are_several else len(holders) > 1
        if not is_safe:
            writers.append(holders[0])
    order = sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))
    shift = max(sum(host == other for other in hosts) for host in set(hosts)) if are_several else 1
    # A search that starts past the largest host's number of ranks finds a free rank of another host at once, if any.
    walks = {rank: [order[(at + shift + n) % len(order)] for n in range(len(order))] for at, rank in enumerate(order)}
    matching = _Matching()
    matching.extend(writers, lambda rank: (other for other in walks[rank] if hosts[other] != hosts[rank]))
    matching.extend(writers, lambda rank: (other for other in walks[rank] if other != rank))
    found = {writer: backup for backup, writer in matching.writer_of.items()}
    return tuple(found.get(rank) for rank in range(len(hosts)))


def survives_host_loss(hosts: Sequence[int], images: Sequence[str], kept_by: Sequence[int | None]) -> bool:
    """Whether every image is still held after the loss of any one of several hosts."""
    held: dict[str, set[int]] = {}
    for rank, image in enumerate(images):
        held.setdefault(image, set()).add(hosts[rank])
        backup = kept_by[rank]
        if backup is not None:
            held[image].add(hosts[backup])
    return len(set(hosts)) == 1 or all(len(places) > 1 for places in held.values())


class _Matching:
    """Bipartite matching of writers to keepers; reassigns earlier pairs if that makes room for one more."""

    def __init__(self) -> None:
        self.writer_of: dict[int, int] = {}

    def extend(self, writers: Iterable[int], candidates: Callable[[int], Iterable[int]]) -> None:
        placed = set(self.writer_of.values())
        for writer in writers:
            if writer not in placed:
                self._place(writer, candidates, set())

    def _place(self, writer: int, candidates: Callable[[int], Iterable[int]], tried: set[int]) -> bool:
        for backup in candidates(writer):
            if backup in tried:
                continue
            tried.add(backup)
            before = self.writer_of.get(backup)
            if before is None or self._place(before, candidates, tried):
                self.writer_of[backup] = writer
                return True
        return False
