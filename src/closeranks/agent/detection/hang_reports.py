"""Merges the hang reports of several hosts, each of which sees its own workers only.

A host whose workers only wait for a worker of another host finds that they hang, too. So a host only reports, and the
leader decides from the reports of all. Invariants: no worker is declared hung while the rank furthest behind of all is
within its deadline; times are sent as ages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from closeranks.agent.detection.hang import Hang, furthest_behind, merge_hangs, position
from closeranks.agent.detection.progress import WorkerPhase, WorkerProgress
from closeranks.agent.detection.root_cause import WorkerReport
from closeranks.agent.membership.field_codecs import ProtocolError

HANG_EVENT = "still"
"""The event that a host's workers hang, as far as it can see."""


def encode_hang(hang: Hang, now: float) -> dict[str, Any]:
    return {
        "event": HANG_EVENT,
        "suspects": list(hang.suspects),
        "step": hang.step,
        "phase": int(hang.phase),
        "age_s": now - hang.since,
        "limit_s": hang.limit_s,
        "is_stopped": hang.is_stopped,
        "why": hang.why,
    }


def decode_hang(fields: Mapping[str, Any], now: float) -> Hang:
    """Decode a report, with times by the reader's clock. Raises ``ProtocolError``."""
    try:
        return Hang(
            suspects=tuple(int(rank) for rank in fields["suspects"]),
            step=None if fields["step"] is None else int(fields["step"]),
            phase=WorkerPhase(fields["phase"]),
            since=now - float(fields["age_s"]),
            limit_s=float(fields["limit_s"]),
            is_stopped=bool(fields["is_stopped"]),
            why=str(fields["why"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a host's hang report cannot be read: {error}") from None


class HangReports:
    """The newest hang report of each host, for one generation. Call ``begin`` before each generation."""

    def __init__(self) -> None:
        self._reports: dict[str, Hang] = {}
        self._confirmed: tuple[Hang, float] | None = None
        self._behind: object = None
        self._behind_since = 0.0

    def begin(self) -> None:
        self._reports, self._confirmed, self._behind = {}, None, None

    @property
    def is_undecided(self) -> bool:
        """Whether there are reports, and no decision yet."""
        return bool(self._reports) and self._confirmed is None

    def add(self, host: str, hang: Hang) -> None:
        self._reports[host] = hang

    def confirmed_hang(
        self, host_of: Mapping[int, str], progress_of: Mapping[int, WorkerProgress], now: float, sure_s: float
    ) -> Hang | None:
        """The hang, returned once, when it is certain. ``progress_of``: of all ranks, as their hosts last reported it.

        When the rank furthest behind moves on, the ranks that waited for it briefly seem to be furthest behind, because
        their progress was reported earlier. So a rank counts as furthest behind only after ``sure_s``.
        """
        if not self.is_undecided or not progress_of.keys() >= host_of.keys():
            return None
        behind = [(rank, position(progress_of[rank])) for rank in furthest_behind(progress_of)]
        if behind != self._behind:
            self._behind, self._behind_since = behind, now
        hang = merge_hangs(self._reports, host_of, progress_of)
        if hang is None or not (hang.is_stopped or now >= self._behind_since + sure_s):
            return None
        self._confirmed = (hang, now)
        return hang

    def blame(self, hang: Hang, now: float) -> None:
        """The confirmed hang, after its explanation has named the rank to blame."""
        self._confirmed = (hang, now)

    def mark_hung(self, workers: Sequence[WorkerReport]) -> tuple[WorkerReport, ...]:
        """The worker reports of a fenced generation, with the workers whose hang it was fenced for marked as hung."""
        if self._confirmed is None:
            return tuple(workers)
        hang, at = self._confirmed
        return tuple(
            replace(worker, hang_kind=hang.kind, hang_s=at - hang.since, hang_cause=hang.cause(at))
            if worker.rank in hang.suspects
            else worker
            for worker in workers
        )
