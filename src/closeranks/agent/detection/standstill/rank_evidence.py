"""What is known about one rank while ranks stand still: what its host collects, and sends to the leader.

Invariant: ``decode_evidence`` returns what ``encode_evidence`` was given, or raises ``ProtocolError``; durations are
ages, since no two hosts share a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from closeranks.agent.detection.hang import ProcessSample
from closeranks.agent.detection.progress import WorkerPhase
from closeranks.agent.detection.standstill.collective_record import Collective, CollectiveState, GroupLabel
from closeranks.agent.membership.field_codecs import ProtocolError

NEWEST_SENT = 32
"""How many of a rank's collectives are compared with those of the others."""


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """One rank."""

    rank: int
    step: int | None
    phase: WorkerPhase
    age_s: float
    """Since its last progress."""
    sample: ProcessSample | None = None
    """None: it was not looked at while it was alive."""
    place: str = ""
    """The innermost line of the user's that its main thread is in; else the innermost line of all."""
    reading: str = ""
    """Where a thread or process of its data loader is in the user's code."""
    loaders: tuple[str, ...] = ()
    """What the processes that it has started do, in words."""
    collectives: tuple[Collective, ...] = ()
    """The newest, oldest first."""
    groups: tuple[GroupLabel, ...] = ()

    @property
    def waiting_in(self) -> Collective | None:
        """The collective that it waits for."""
        return next((one for one in reversed(self.collectives) if one.is_waiting), None)

    def num_issued(self, group: str) -> int:
        """How many collectives it has issued in a group."""
        return next((label.sequence for label in self.groups if label.name == group), 0)

    @property
    def state(self) -> str:
        return self.sample.state if self.sample is not None else ""


def encode_evidence(evidence: RankEvidence) -> dict[str, Any]:
    return asdict(evidence)


def decode_evidence(encoded: Mapping[str, Any]) -> RankEvidence:
    """Raises ``ProtocolError``."""
    try:
        sample = encoded["sample"]
        return RankEvidence(
            rank=int(encoded["rank"]),
            step=None if encoded["step"] is None else int(encoded["step"]),
            phase=WorkerPhase(encoded["phase"]),
            age_s=float(encoded["age_s"]),
            sample=None if sample is None else ProcessSample(**sample),
            place=str(encoded["place"]),
            reading=str(encoded["reading"]),
            loaders=tuple(map(str, encoded["loaders"])),
            collectives=tuple(map(_collective, encoded["collectives"])),
            groups=tuple(map(_group, encoded["groups"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a host's report of what its ranks wait for cannot be read: {error}") from None


def _collective(encoded: Mapping[str, Any]) -> Collective:
    known = {field.name: encoded[field.name] for field in fields(Collective)}
    return Collective(**{**known, "state": CollectiveState(encoded["state"]), "shape": tuple(encoded["shape"])})


def _group(encoded: Mapping[str, Any]) -> GroupLabel:
    return GroupLabel(
        str(encoded["name"]), str(encoded["axis"]), tuple(map(int, encoded["ranks"])), int(encoded["sequence"])
    )
