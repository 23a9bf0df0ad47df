"""Plans a restore: which snapshot a new generation resumes from, and which rank reads which copy.

Every host reports what its snapshot memory holds; from the same reports all ranks compute the same plan. Invariants:
the chosen state is the newest of which every image is held somewhere, in slots of one generation and step, never a
mix; an image that a host lacks is sent to it once, even if several of its ranks need it. Pure: a caller that found a
copy damaged leaves it out and calls again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from closeranks.capture.slots import SlotHeader

OWN_FILES = (0, 1)
PEER_FILES = (2, 3)
"""The slots of a worker's snapshot memory: two for its own image, two for the image of a peer."""

StateKey = tuple[int, int, int]
"""``SlotHeader.key``: run, step, generation."""


@dataclass(frozen=True, slots=True)
class SnapshotLocation:
    """Location of a slot: host, index of the worker on that host, and number of the slot."""

    host: int
    local_index: int
    file: int

    @property
    def is_own(self) -> bool:
        return self.file in OWN_FILES


@dataclass(frozen=True, slots=True)
class SnapshotCopy:
    location: SnapshotLocation
    about: SlotHeader


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where a rank of the new generation runs, and which image it will hold."""

    host: int
    local_index: int
    image: str


@dataclass(frozen=True, slots=True)
class SnapshotFetch:
    """A copy that another host needs: ``source`` reads and sends it, ``target`` receives it for its whole host."""

    copy: SnapshotCopy
    source: int
    target: int
    host: int
    """The target's."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    state: StateKey
    reads: tuple[Mapping[str, SnapshotCopy], ...]
    """For each rank: the copy to read each image it needs from, its own image first. A copy that is not on the rank's
    host is among the fetches."""
    fetches: tuple[SnapshotFetch, ...]
    is_same_layout: bool

    @property
    def step(self) -> int:
        return self.state[1]

    def source_of(self, rank: int, host: int) -> str:
        """Where this rank reads from: ``memory`` if all copies were written by workers of its own host, else
        ``peer``."""
        is_near = all(copy.location.host == host and copy.location.is_own for copy in self.reads[rank].values())
        return "memory" if is_near else "peer"


def complete_states(copies: Iterable[SnapshotCopy], run: int) -> list[StateKey]:
    """States of which every image is held, newest first."""
    held: dict[StateKey, set[str]] = {}
    wanted: dict[StateKey, int] = {}
    for copy in copies:
        if copy.about.run == run:
            held.setdefault(copy.about.key, set()).add(copy.about.image)
            wanted[copy.about.key] = copy.about.num_images
    return sorted((state for state, images in held.items() if len(images) == wanted[state]), reverse=True)


def plan_restore(
    copies: Sequence[SnapshotCopy], placements: Sequence[RankPlacement], layout: str, run: int = 0
) -> RestorePlan | None:
    """None if no state is complete."""
    states = complete_states(copies, run)
    if not states:
        return None
    found = sorted(
        (c for c in copies if c.about.key == states[0]), key=lambda c: (c.location.host, c.location.local_index)
    )
    found.sort(key=lambda copy: not copy.location.is_own)  # a worker's own copy before a peer's
    is_same = all(copy.about.layout == layout for copy in found)
    names = sorted({copy.about.image for copy in found})
    is_same = is_same and {placement.image for placement in placements} == set(names)
    reads = tuple(
        _reads(rank, placement, [placement.image] if is_same else names, found)
        for rank, placement in enumerate(placements)
    )
    return RestorePlan(states[0], reads, tuple(_fetches(reads, placements)), is_same)


def _reads(
    rank: int, placement: RankPlacement, names: Iterable[str], found: Sequence[SnapshotCopy]
) -> dict[str, SnapshotCopy]:
    """The nearest copy of each image: in this worker's own slots, then written by the same rank, then any on this host,
    then any."""

    def distance(copy: SnapshotCopy) -> tuple[bool, bool, bool, bool]:
        location = copy.location
        is_here = location.host == placement.host
        is_mine = is_here and location.local_index == placement.local_index and location.is_own
        return not is_here, not is_mine, copy.about.rank != rank, not location.is_own

    return {name: min((copy for copy in found if copy.about.image == name), key=distance) for name in names}


def _fetches(
    reads: Sequence[Mapping[str, SnapshotCopy]], placements: Sequence[RankPlacement]
) -> Iterable[SnapshotFetch]:
    """One fetch for each host and image that it lacks, balanced over the ranks of both hosts."""
    by_host: dict[int, list[int]] = {}
    for rank, placement in enumerate(placements):
        by_host.setdefault(placement.host, []).append(rank)
    known: set[tuple[int, str]] = set()
    num_jobs = [0] * len(placements)
    for rank, wanted in enumerate(reads):
        host = placements[rank].host
        for name, copy in wanted.items():
            if copy.location.host == host or (host, name) in known:
                continue
            known.add((host, name))
            needing = [other for other in by_host[host] if name in reads[other]]
            source = min(by_host[copy.location.host], key=lambda other: (num_jobs[other], other))
            target = min(needing, key=lambda other: (num_jobs[other], other))
            num_jobs[source] += 1
            num_jobs[target] += 1
            yield SnapshotFetch(copy, source, target, host)


def is_in_place(
    plan: RestorePlan,
    copies: Sequence[SnapshotCopy],
    placements: Sequence[RankPlacement],
    kept_by: Sequence[int | None],
) -> bool:
    """Whether every rank and every peer already holds the chosen state in the slots where it would be written, so that
    no snapshot is needed before the first step."""
    held = {
        (c.location.host, c.location.local_index, c.location.is_own, c.about.image)
        for c in copies
        if c.about.key == plan.state
    }
    for rank, placement in enumerate(placements):
        if (placement.host, placement.local_index, True, placement.image) not in held:
            return False
        number = kept_by[rank]
        if (
            number is not None
            and (placements[number].host, placements[number].local_index, False, placement.image) not in held
        ):
            return False
    return plan.is_same_layout


def slot_to_overwrite(
    copies: Iterable[SnapshotCopy], state: StateKey | None, placement: RankPlacement, files: tuple[int, int]
) -> int:
    """Which of a pair of slots to write first: the one that does not hold the state the run resumes from."""
    taken = {
        c.location.file
        for c in copies
        if c.about.key == state and (c.location.host, c.location.local_index) == (placement.host, placement.local_index)
    }
    return files[1] if files[0] in taken else files[0]


def rank_placements(hosts: Sequence[int], images: Sequence[str]) -> tuple[RankPlacement, ...]:
    """Workers of a host are numbered in rank order."""
    return tuple(RankPlacement(host, hosts[:rank].count(host), images[rank]) for rank, host in enumerate(hosts))
