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


def encode_hang(still: Hang, now: float) -> dict[str, Any]:
    return {
        "event": HANG_EVENT,
        "suspects": list(still.suspects),
        "step": still.step,
        "phase": int(still.phase),
        "age_s": now - still.since,
        "limit_s": still.limit_s,
        "is_stopped": still.is_stopped,
        "why": still.why,
    }


def decode_hang(told: Mapping[str, Any], now: float) -> Hang:
    """Decode a report, with times by the reader's clock. Raises ``ProtocolError``."""
    try:
        return Hang(
            suspects=tuple(int(rank) for rank in told["suspects"]),
            step=None if told["step"] is None else int(told["step"]),
            phase=WorkerPhase(told["phase"]),
            since=now - float(told["age_s"]),
            limit_s=float(told["limit_s"]),
            is_stopped=bool(told["is_stopped"]),
            why=str(told["why"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a host's hang report cannot be read: {error}") from None


class HangReports:
    """The newest hang report of each host, for one generation. Call ``begin`` before each generation."""

    def __init__(self) -> None:
        self._claims: dict[str, Hang] = {}
        self._verdict: tuple[Hang, float] | None = None
        self._front: object = None
        self._front_since = 0.0

    def begin(self) -> None:
        self._claims, self._verdict, self._front = {}, None, None

    @property
    def is_undecided(self) -> bool:
        """Whether there are reports, and no decision yet."""
        return bool(self._claims) and self._verdict is None

    def add(self, host: str, still: Hang) -> None:
        self._claims[host] = still

    def confirmed_hang(
        self, host_of: Mapping[int, str], words: Mapping[int, WorkerProgress], now: float, sure_s: float
    ) -> Hang | None:
        """The hang, returned once, when it is certain. ``words``: progress of all ranks, as their hosts last reported.

        When the rank furthest behind moves on, the ranks that waited for it briefly seem to be furthest behind, because
        their progress was reported earlier. So a rank counts as furthest behind only after ``sure_s``.
        """
        if not self.is_undecided or not words.keys() >= host_of.keys():
            return None
        front = [(rank, position(words[rank])) for rank in furthest_behind(words)]
        if front != self._front:
            self._front, self._front_since = front, now
        still = merge_hangs(self._claims, host_of, words)
        if still is None or not (still.is_stopped or now >= self._front_since + sure_s):
            return None
        self._verdict = (still, now)
        return still

    def mark_hung(self, workers: Sequence[WorkerReport]) -> tuple[WorkerReport, ...]:
        """The worker reports of a fenced generation, with the workers whose hang it was fenced for marked as hung."""
        if self._verdict is None:
            return tuple(workers)
        still, at = self._verdict
        return tuple(
            replace(fact, hang_kind=still.kind, hang_s=at - still.since, hang_cause=still.cause(at))
            if fact.rank in still.suspects
            else fact
            for fact in workers
        )
