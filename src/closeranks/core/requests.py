"""Requests to a run: what a person, a scheduler, an agent or the training code can ask for while it trains.

Whoever asks names a ``Request``. The agents pass it on without looking at it, every worker brings what it has heard to
the vote of its step, and the verdict gives all ranks the same set after the same step. A new request is one ``define``
here, somebody who asks for it and somebody who acts on it (docs/rooms.md).

Invariant: requests take the same room in the vote however many kinds there are, so that a new kind does not change the
order in which losses and norms are added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from closeranks.core.registry import Registry

NUM_SLOTS = 4
"""Numbers of the vote that carry requests."""
_KINDS_PER_SLOT = 2
_BITS = 26
"""A slot counts the ranks that ask for its first kind in its lower 26 bits and those that ask for its second above
them: exact in float64 for up to 67 million ranks."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    kind: str
    """Its name between processes."""
    is_sticky: bool = True
    """Whether a worker that has heard it brings it to every vote from then on, or to the next one alone."""


REQUESTS: Registry[RunRequest] = Registry("request")
_order: list[RunRequest] = []
_weights: dict[RunRequest, tuple[int, float]] = {}


def define(kind: str, *, stays: bool = True) -> RunRequest:
    """A new kind of request. Every process of a job must define the same kinds in the same order."""
    if len(_order) == NUM_SLOTS * _KINDS_PER_SLOT:
        raise ValueError(f"the vote has room for {len(_order)} kinds of requests: there is none left for '{kind}'")
    request = REQUESTS.register(kind)(RunRequest(kind, stays))
    digit, slot = divmod(len(_order), NUM_SLOTS)
    _weights[request] = (slot, float(1 << _BITS * digit))
    _order.append(request)
    return request


DRAIN = define("drain")
"""Finish the step, save, and end the run. Asked for from outside."""
SAVE = define("save", stays=False)
"""Save after this step, and go on."""
STOP = define("stop")
"""As ``DRAIN``, but asked for by the training code itself."""
REGROUP = define("regroup")
"""End this generation after the step, with the state in memory: the next one takes over from there."""


class PendingRequests:
    """What a process has been asked for. A signal handler may call ``add``."""

    def __init__(self) -> None:
        self._asked: set[RunRequest] = set()

    def add(self, request: RunRequest) -> None:
        self._asked.add(request)

    def __contains__(self, request: RunRequest) -> bool:
        return request in self._asked

    def take(self) -> frozenset[RunRequest]:
        """For the next vote; what does not stay is handed out once."""
        if not self._asked:
            return frozenset()
        asked = frozenset(self._asked)
        self._asked.difference_update([request for request in asked if not request.is_sticky])
        return asked


def encode(requests: Iterable[RunRequest]) -> list[float]:
    """The numbers by which one rank votes for a set of requests; over the ranks they are added up."""
    slots = [0.0] * NUM_SLOTS
    for request in requests:
        slot, weight = _weights[request]
        slots[slot] += weight
    return slots


def decode(sums: Sequence[float]) -> frozenset[RunRequest]:
    """What any rank has asked for, from the sums of what ``encode`` gave on each."""
    if not any(sums):
        return frozenset()
    return frozenset(request for number, request in enumerate(_order) if _count(sums, number))


def _count(sums: Sequence[float], number: int) -> int:
    """How many ranks have asked for the kind that was defined as this one."""
    digit, slot = divmod(number, NUM_SLOTS)
    return (round(sums[slot]) >> _BITS * digit) & ((1 << _BITS) - 1)
