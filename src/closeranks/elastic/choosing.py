"""From which copies does a new generation go on, and who reads which?

Every host tells what lies in its boxes; from that all ranks come to the same choice. Invariants: the state chosen is
the newest of which every image is held somewhere, by slots of one generation and step, never a mix; what a host lacks
is sent to it once, whoever of its ranks needs it. Pure: whoever found a copy bad leaves it out and asks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from closeranks.capture.slots import About

OWN_FILES = (0, 1)
PEER_FILES = (2, 3)
"""Of a box: two slots for its worker's image, two for that of a peer."""

State = tuple[int, int, int]
"""``About.key``: run, step, generation."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slot lies."""

    host: int
    box: int
    file: int

    @property
    def is_own(self) -> bool:
        return self.file in OWN_FILES


@dataclass(frozen=True, slots=True)
class Copy:
    place: Place
    about: About


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank of the new generation is, and what it will hold."""

    host: int
    box: int
    image: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """A copy that another host needs: ``source`` reads and sends it, ``target`` receives it for its whole host."""

    copy: Copy
    source: int
    target: int
    host: int
    """The target's."""


@dataclass(frozen=True, slots=True)
class Choice:
    state: State
    reads: tuple[Mapping[str, Copy], ...]
    """Of each rank: from which copy it takes each image it needs, its own image first. One that is not on its host is
    among the fetches."""
    fetches: tuple[Fetch, ...]
    is_same_layout: bool

    @property
    def step(self) -> int:
        return self.state[1]

    def source_of(self, rank: int, host: int) -> str:
        """How far this rank has to go: ``memory`` of its host's workers, or copies that ``peer``s kept."""
        is_near = all(copy.place.host == host and copy.place.is_own for copy in self.reads[rank].values())
        return "memory" if is_near else "peer"


def complete_states(copies: Iterable[Copy], run: int) -> list[State]:
    """Those of which every image is held, newest first."""
    held: dict[State, set[str]] = {}
    wanted: dict[State, int] = {}
    for copy in copies:
        if copy.about.run == run:
            held.setdefault(copy.about.key, set()).add(copy.about.image)
            wanted[copy.about.key] = copy.about.num_images
    return sorted((state for state, images in held.items() if len(images) == wanted[state]), reverse=True)


def choose(copies: Sequence[Copy], seats: Sequence[Seat], layout: str, run: int = 0) -> Choice | None:
    """None where no state is whole."""
    states = complete_states(copies, run)
    if not states:
        return None
    found = sorted((c for c in copies if c.about.key == states[0]), key=lambda c: (c.place.host, c.place.box))
    found.sort(key=lambda copy: not copy.place.is_own)  # what its own worker wrote comes before a peer's
    is_same = all(copy.about.layout == layout for copy in found)
    names = sorted({copy.about.image for copy in found})
    is_same = is_same and {seat.image for seat in seats} == set(names)
    reads = tuple(_reads(rank, seat, [seat.image] if is_same else names, found) for rank, seat in enumerate(seats))
    return Choice(states[0], reads, tuple(_fetches(reads, seats)), is_same)


def _reads(rank: int, seat: Seat, names: Iterable[str], found: Sequence[Copy]) -> dict[str, Copy]:
    """Nearest first: the slot of its own box, one that the same rank wrote, any of its host, any at all."""

    def distance(copy: Copy) -> tuple[bool, bool, bool, bool]:
        place = copy.place
        is_here = place.host == seat.host
        is_mine = is_here and place.box == seat.box and place.is_own
        return not is_here, not is_mine, copy.about.rank != rank, not place.is_own

    return {name: min((copy for copy in found if copy.about.image == name), key=distance) for name in names}


def _fetches(reads: Sequence[Mapping[str, Copy]], seats: Sequence[Seat]) -> Iterable[Fetch]:
    """One for each host and image that it lacks; the work is dealt out among the ranks of both hosts in turn."""
    by_host: dict[int, list[int]] = {}
    for rank, seat in enumerate(seats):
        by_host.setdefault(seat.host, []).append(rank)
    known: set[tuple[int, str]] = set()
    num_jobs = [0] * len(seats)
    for rank, wanted in enumerate(reads):
        host = seats[rank].host
        for name, copy in wanted.items():
            if copy.place.host == host or (host, name) in known:
                continue
            known.add((host, name))
            needing = [other for other in by_host[host] if name in reads[other]]
            source = min(by_host[copy.place.host], key=lambda other: (num_jobs[other], other))
            target = min(needing, key=lambda other: (num_jobs[other], other))
            num_jobs[source] += 1
            num_jobs[target] += 1
            yield Fetch(copy, source, target, host)


def is_in_place(choice: Choice, copies: Sequence[Copy], seats: Sequence[Seat], kept_by: Sequence[int | None]) -> bool:
    """Whether every rank and every peer has the chosen state just where it would be written: nothing need be copied
    anew before the first step."""
    held = {(c.place.host, c.place.box, c.place.is_own, c.about.image) for c in copies if c.about.key == choice.state}
    for rank, seat in enumerate(seats):
        if (seat.host, seat.box, True, seat.image) not in held:
            return False
        number = kept_by[rank]
        if number is not None and (seats[number].host, seats[number].box, False, seat.image) not in held:
            return False
    return choice.is_same_layout


def free_file(copies: Iterable[Copy], state: State | None, seat: Seat, files: tuple[int, int]) -> int:
    """Which of a pair of slots to write first: the one that does not hold the state the run goes on from."""
    taken = {
        c.place.file for c in copies if c.about.key == state and (c.place.host, c.place.box) == (seat.host, seat.box)
    }
    return files[1] if files[0] in taken else files[0]


def seats_of(hosts: Sequence[int], images: Sequence[str]) -> tuple[Seat, ...]:
    """Workers of a host take its boxes in the order of their ranks."""
    return tuple(Seat(host, hosts[:rank].count(host), images[rank]) for rank, host in enumerate(hosts))
