"""This host's processes and memory: the zygote, the snapshot memory and the workers of the current generation.

Invariant: when a host is closed, none of its processes and none of its memory is left. Snapshot memory lives as long as
the host object, and outlives every worker and every zygote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from closeranks.agent.boxes import Boxes
from closeranks.agent.crew import Crew
from closeranks.agent.launch import LaunchPlan, Listener
from closeranks.agent.loop import Loop
from closeranks.agent.member import Berth, Member
from closeranks.agent.nursery import Nursery
from closeranks.agent.verdict import WorkerFact
from closeranks.agent.view import Seen
from closeranks.core.errors import CloseranksError
from closeranks.core.world import World


@dataclass(frozen=True, slots=True)
class Condition:
    """The status of a generation's workers on this host."""

    num_left: int = 0
    """Workers that are not known to have ended."""
    failed_at: float | None = None
    is_clear: bool = False
    """Whether a worker died without a report: the root cause is known without the reports of others."""
    all_spoken: bool = True


class Host:
    """This host, as a participant in the job. Callers run the event loop."""

    def __init__(
        self, plan: LaunchPlan, loop: Loop, listener: Listener, *, name: str, on_store: Callable[[str], None]
    ) -> None:
        self.name = name
        self._plan = plan
        self._loop = loop
        self._listener = listener
        self._on_store = on_store
        self.capacity = plan.num_workers
        self.boxes = Boxes()
        self.crew: Crew | None = None
        self._nursery = Nursery(plan, loop, listener)

    @property
    def is_ready(self) -> bool:
        return self._nursery.is_ready and self._nursery.error is None

    @property
    def error(self) -> CloseranksError | None:
        return self._nursery.error

    @property
    def was_ready(self) -> bool:
        return self._nursery.was_ready

    @property
    def zygote(self) -> int | None:
        return self._nursery.pid if self._nursery.error is None else None

    @property
    def members(self) -> list[Member]:
        return self.crew.members if self.crew else []

    def revive(self) -> None:
        """Replace a zygote that was lost."""
        self._nursery.revive()

    def begin(self, worlds: Sequence[World], payload: Mapping[str, Any]) -> None:
        self._close_crew()
        if self._plan.is_elastic:
            self.boxes.provide(len(worlds))
        berth = Berth(payload, self._plan.config.host, self.boxes.paths, self._on_store)
        self.crew = Crew(self._plan, worlds, self._nursery, self._loop, self._listener, berth)

    def move_logs(self, folder: Path) -> None:
        """Move the logs of all current processes to this folder, with what they have printed so far."""
        self._nursery.move_log(folder)
        for member in self.members:
            member.move_log(folder)

    def clear(self) -> None:
        """Close the worker group of the last generation without starting another."""
        self._close_crew()

    def pass_store_on(self, address: str) -> None:
        if self.crew is not None:
            self.crew.pass_store_on(address)

    def fence(self) -> None:
        if self.crew is not None:
            self.crew.fence()

    @property
    def condition(self) -> Condition:
        if self.crew is None:
            return Condition()
        members = self.crew.members
        return Condition(
            num_left=self.crew.num_left,
            failed_at=self.crew.failed_at,
            is_clear=any(member.is_silent for member in members),
            all_spoken=self.crew.all_spoken,
        )

    def facts(self) -> list[WorkerFact]:
        return self.crew.facts() if self.crew else []

    def seen(self) -> list[Seen]:
        return [
            Seen(member.world.rank, self.name, member.pid, member.progress, member.world.local_rank)
            for member in self.members
        ]

    def mind(self, now: float) -> float | None:
        """Reap orphans and check that the zygote responds; returns when to call it again."""
        self._nursery.reap()
        return self._nursery.mind(now)

    def settled(self) -> None:
        """Every rank has a snapshot of its own: free what earlier, larger generations left for other local ranks."""
        self.boxes.retire(len(self.members))

    def _close_crew(self) -> None:
        crew, self.crew = self.crew, None
        if crew is not None:
            crew.__exit__(None, None, None)

    def __enter__(self) -> Host:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._close_crew()
        finally:
            self._nursery.__exit__(kind, error, tb)
            self.boxes.close()
