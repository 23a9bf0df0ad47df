"""Who stands still, where every host sees its own workers alone?

A host whose workers only wait for one elsewhere finds that they stand still, too: what it says is a claim, and the lead
joins the claims of all. Invariants: nobody is given up while the one who is furthest behind of all has time left; times
travel as ages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from closeranks.agent.hang import Still, join
from closeranks.agent.membership.checks import ProtocolError
from closeranks.agent.progress import Phase, Progress
from closeranks.agent.verdict import WorkerFact

CLAIM = "still"
"""The event that a host's workers stand still, as far as it can see."""


def claim_fields(still: Still, now: float) -> dict[str, Any]:
    return {
        "event": CLAIM,
        "suspects": list(still.suspects),
        "step": still.step,
        "phase": int(still.phase),
        "age_s": now - still.since,
        "limit_s": still.limit_s,
        "is_stopped": still.is_stopped,
        "why": still.why,
    }


def claim_of(told: Mapping[str, Any], now: float) -> Still:
    """By the reader's clock. Raises ``ProtocolError``."""
    try:
        return Still(
            suspects=tuple(int(rank) for rank in told["suspects"]),
            step=None if told["step"] is None else int(told["step"]),
            phase=Phase(told["phase"]),
            since=now - float(told["age_s"]),
            limit_s=float(told["limit_s"]),
            is_stopped=bool(told["is_stopped"]),
            why=str(told["why"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a host's claim cannot be read: {error}") from None


class Claims:
    """Those of one generation, the newest of each host. ``begin`` comes before each."""

    def __init__(self) -> None:
        self._claims: dict[str, Still] = {}
        self._verdict: tuple[Still, float] | None = None

    def begin(self) -> None:
        self._claims, self._verdict = {}, None

    @property
    def is_open(self) -> bool:
        """Whether there is anything to decide."""
        return bool(self._claims) and self._verdict is None

    def hear(self, host: str, still: Still) -> None:
        self._claims[host] = still

    def verdict(self, host_of: Mapping[int, str], words: Mapping[int, Progress], now: float) -> Still | None:
        """Once, when it is certain; ``words`` of all ranks."""
        if not self.is_open or not words.keys() >= host_of.keys():
            return None
        still = join(self._claims, host_of, words)
        self._verdict = None if still is None else (still, now)
        return still

    def mark(self, workers: Sequence[WorkerFact]) -> tuple[WorkerFact, ...]:
        """Of the workers of a generation that was given up, those that it was given up for."""
        if self._verdict is None:
            return tuple(workers)
        still, at = self._verdict
        return tuple(
            replace(fact, still=still.kind, still_s=at - still.since, still_why=still.cause(at))
            if fact.rank in still.suspects
            else fact
            for fact in workers
        )
