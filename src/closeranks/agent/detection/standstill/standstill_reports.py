"""Decides when the leader tells that ranks stand still, from what all hosts have reported.

Invariants: a standstill is told once, before anything is done about it; where a hang is declared, the rank that the
explanation blames is the one that is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from closeranks.agent.detection.hang import Hang
from closeranks.agent.detection.standstill.explanation import Explanation, explain, explain_mismatch
from closeranks.agent.detection.standstill.hang_report import HangReport
from closeranks.agent.detection.standstill.rank_evidence import RankEvidence
from closeranks.core.events import Standstill

_OTHER_HOSTS_S = 0.7
"""How long to wait for what other hosts report before a standstill is told: each looks for itself."""


class StandstillReports:
    """What the hosts have reported, for one generation. Call ``begin`` before each generation."""

    def __init__(self) -> None:
        self._evidence: dict[int, RankEvidence] = {}
        self._at = 0.0
        self._stall: tuple[Hang, float] | None = None
        self._told: set[tuple[object, ...]] = set()

    def begin(self) -> None:
        self._evidence, self._stall, self._told = {}, None, set()

    def add(self, report: HangReport, now: float) -> None:
        """A host has looked at its workers: what it says replaces what it said before."""
        self._evidence |= {one.rank: one for one in report.evidence}
        self._at = now
        if report.is_stall:
            self._stall = (report.hang, now)

    def stall_to_tell(self, host_of: Mapping[int, str], generation: int, now: float) -> Standstill | None:
        """A standstill to tell although no deadline has passed, once other hosts had the time to report theirs."""
        if self._stall is None:
            return None
        hang, at = self._stall
        has_others = len(set(host_of.values())) > 1
        if has_others and now < at + _OTHER_HOSTS_S:
            return None
        self._stall = None
        return self._event(hang, explain(self._evidence, hang.suspects, now - self._at), host_of, generation, now)

    def explain_hang(
        self, hang: Hang, host_of: Mapping[int, str], generation: int, now: float
    ) -> tuple[Hang, Standstill | None]:
        """A declared hang with the rank that is to blame, and what to tell unless it was told."""
        self._stall = None
        found = explain(self._evidence, hang.suspects, now - self._at)
        event = self._event(hang, found, host_of, generation, now)
        if found is None or found.culprit not in self._evidence or hang.is_stopped:
            return hang, event
        if hang.culprit == found.culprit:
            return replace(hang, why=hang.why or found.in_brief), event
        culprit = self._evidence[found.culprit]
        blamed = replace(hang, suspects=(found.culprit,), phase=culprit.phase, step=culprit.step, why=found.in_brief)
        return blamed, event

    def _event(
        self, hang: Hang, found: Explanation | None, host_of: Mapping[int, str], generation: int, now: float
    ) -> Standstill | None:
        key = (hang.step, found.kind, found.culprit) if found else ()
        if found is None or key in self._told:
            return None
        self._told.add(key)
        host = host_of.get(found.culprit, "")
        return Standstill(
            generation, hang.step, now - hang.since, found.culprit, host, found.kind, found.cause, list(found.lines)
        )


def explain_failure(evidence: Sequence[RankEvidence], host_of: Mapping[int, str], generation: int) -> Standstill | None:
    """Ranks whose collectives did not match, where a rank has raised an error. ``evidence``: of all hosts."""
    found = explain_mismatch({one.rank: one for one in evidence})
    if found is None:
        return None
    step = next((one.step for one in evidence if found.culprit in (one.rank, -1)), None)
    host = host_of.get(found.culprit, "")
    return Standstill(generation, step, 0.0, found.culprit, host, found.kind, found.cause, list(found.lines))
