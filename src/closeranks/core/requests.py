"""Requests to a run: what a user, a scheduler, an agent or the training code can ask for while it trains.

A request is a ``RunRequest``. The agents forward it without interpreting it, every worker adds the requests it has
received to the vote of its step, and the result gives all ranks the same set after the same step. A new request needs
one ``define`` here, code that asks for it and code that acts on it (docs/rooms.md).

Invariant: requests take the same number of elements in the vote however many kinds there are, so that a new kind does
not change the order in which losses and norms are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from closeranks.core.registry import Registry

NUM_SLOTS = 4
"""Elements of the vote that carry requests."""
_KINDS_PER_SLOT = 2
_BITS = 26
"""A slot counts the ranks that ask for its first kind in its lower 26 bits, and those that ask for its second kind in
the bits above: exact in float64 for up to 67 million ranks."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    kind: str
    """Its name in messages between processes."""
    is_sticky: bool = True
    """Whether a worker that has received it adds it to every vote from then on, or only to the next one."""


REQUESTS: Registry[RunRequest] = Registry("request")
_order: list[RunRequest] = []
_weights: dict[RunRequest, tuple[int, float]] = {}


def define(kind: str, *, is_sticky: bool = True) -> RunRequest:
    """A new kind of request. Every process of a job must define the same kinds in the same order."""
    if len(_order) == NUM_SLOTS * _KINDS_PER_SLOT:
        raise ValueError(f"the vote has room for {len(_order)} kinds of requests: there is none left for '{kind}'")
    request = REQUESTS.register(kind)(RunRequest(kind, is_sticky))
    digit, slot = divmod(len(_order), NUM_SLOTS)
    _weights[request] = (slot, float(1 << _BITS * digit))
    _order.append(request)
    return request


DRAIN = define("drain")
"""Finish the step, save, and end the run. Requested from outside."""
SAVE = define("save", is_sticky=False)
"""Save after this step, and continue."""
STOP = define("stop")
"""Like ``DRAIN``, but requested by the training code itself."""
REGROUP = define("regroup")
"""End this generation after the step, with the state in memory: the next generation continues from there."""
PROFILE = define("profile", is_sticky=False)
"""Trace some of the next steps, and continue. Which ones and on which ranks, rank 0 knows and tells the others."""


class PendingRequests:
    """The requests that a process has received. A signal handler may call ``add``."""

    def __init__(self) -> None:
        self._asked: set[RunRequest] = set()

    def add(self, request: RunRequest) -> None:
        self._asked.add(request)

    def __contains__(self, request: RunRequest) -> bool:
        return request in self._asked

    def take(self) -> frozenset[RunRequest]:
        """The requests for the next vote; those that do not stay are returned once."""
        if not self._asked:
            return frozenset()
        asked = frozenset(self._asked)
        self._asked.difference_update([request for request in asked if not request.is_sticky])
        return asked


def encode(requests: Iterable[RunRequest]) -> list[float]:
    """The numbers with which one rank votes for a set of requests; they are summed over the ranks."""
    slots = [0.0] * NUM_SLOTS
    for request in requests:
        slot, weight = _weights[request]
        slots[slot] += weight
    return slots


def decode(sums: Sequence[float]) -> frozenset[RunRequest]:
    """What any rank has requested, from the sums of what ``encode`` gave on each."""
    if not any(sums):
        return frozenset()
    return frozenset(request for number, request in enumerate(_order) if _count(sums, number))


def _count(sums: Sequence[float], number: int) -> int:
    """How many ranks have requested the kind with this number, in the order of definition."""
    digit, slot = divmod(number, NUM_SLOTS)
    return (round(sums[slot]) >> _BITS * digit) & ((1 << _BITS) - 1)
