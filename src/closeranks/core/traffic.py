"""What does this rank send? Counts calls and bytes of collectives, by the names of their phases (``core.phases``).

Code that starts a collective counts it; the recorder of phases takes the counts at the end of each step. A collective
is counted where it starts and its waiting where it ends, so a phase may show no time for bytes that computation hid.
Bytes are those of a ring, whatever algorithm the backend chooses: the least that a rank must send. Invariant: nothing
here waits, copies or looks at a tensor's values. Cost: under a microsecond a collective.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

RingOperation = Literal["all-reduce", "reduce-scatter", "all-gather"]
_TIMES_SENT = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}


class SizedTensor(Protocol):
    """The part of a tensor that says how large it is."""

    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True)
class SentCounts:
    """By ``AXIS.COLLECTIVE``."""

    num_bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)


_counts = SentCounts()


def ring_sent_bytes(operation: RingOperation, num_ranks: int, payload_bytes: int) -> int:
    """What a rank sends of a collective whose whole tensor (the input of a reduction, the output of a gather) has this
    size: an all-reduce sends every byte but the rank's own share twice, the others once."""
    return _TIMES_SENT[operation] * (num_ranks - 1) * payload_bytes // num_ranks


def count_sent(name: str, num_bytes: int) -> None:
    """A collective, or a message, with which this rank sends so many bytes."""
    _counts.num_bytes[name] = _counts.num_bytes.get(name, 0) + num_bytes
    _counts.calls[name] = _counts.calls.get(name, 0) + 1


def count_collective(axis: str, operation: RingOperation, num_ranks: int, whole: SizedTensor) -> None:
    """A collective over ``num_ranks``; ``whole``: the input of a reduction, or the output of a gather."""
    count_sent(f"{axis}.{operation.replace('-', '_')}", ring_sent_bytes(operation, num_ranks, whole.nbytes))


def take_sent() -> SentCounts:
    """What was counted since the last call."""
    global _counts
    taken, _counts = _counts, SentCounts()
    return taken
