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

from closeranks.agent.detection.root_cause import WorkerReport
from closeranks.agent.event_loop import EventLoop
from closeranks.agent.host.snapshot_memory import SnapshotMemory
from closeranks.agent.job_view import WorkerView
from closeranks.agent.launch_plan import AgentCallbacks, LaunchPlan
from closeranks.agent.workers.worker_group import WorkerGroup
from closeranks.agent.workers.worker_process import WorkerProcess, WorkerSetup
from closeranks.agent.workers.zygote_client import ZygoteClient
from closeranks.core.errors import CloseranksError
from closeranks.core.world import World


@dataclass(frozen=True, slots=True)
class WorkerGroupStatus:
    """The status of a generation's workers on this host."""

    num_left: int = 0
    """Workers that are not known to have ended."""
    failed_at: float | None = None
    has_silent_death: bool = False
    """Whether a worker died without a report: the root cause is known without the reports of others."""
    all_reported: bool = True


class LocalHost:
    """This host, as a participant in the job. Callers run the event loop."""

    def __init__(
        self,
        plan: LaunchPlan,
        loop: EventLoop,
        callbacks: AgentCallbacks,
        *,
        name: str,
        on_store: Callable[[str], None],
    ) -> None:
        self.name = name
        self._plan = plan
        self._loop = loop
        self._callbacks = callbacks
        self._on_store = on_store
        self.capacity = plan.num_workers
        self.snapshot_memory = SnapshotMemory()
        self.worker_group: WorkerGroup | None = None
        self._zygote_client = ZygoteClient(plan, loop, callbacks)

    @property
    def is_ready(self) -> bool:
        return self._zygote_client.is_ready and self._zygote_client.error is None

    @property
    def error(self) -> CloseranksError | None:
        return self._zygote_client.error

    @property
    def was_ready(self) -> bool:
        return self._zygote_client.was_ready

    @property
    def zygote(self) -> int | None:
        return self._zygote_client.pid if self._zygote_client.error is None else None

    @property
    def workers(self) -> list[WorkerProcess]:
        return self.worker_group.workers if self.worker_group else []

    def restart_zygote(self) -> None:
        """Replace a zygote that was lost."""
        self._zygote_client.restart()

    def start_workers(self, worlds: Sequence[World], payload: Mapping[str, Any]) -> None:
        self._close_group()
        if self._plan.is_elastic:
            self.snapshot_memory.grow(len(worlds))
        setup = WorkerSetup(payload, self._plan.config.host, self.snapshot_memory.paths, self._on_store)
        self.worker_group = WorkerGroup(self._plan, worlds, self._zygote_client, self._loop, self._callbacks, setup)

    def move_logs(self, folder: Path) -> None:
        """Move the logs of all current processes to this folder, with what they have printed so far."""
        self._zygote_client.move_log(folder)
        for worker in self.workers:
            worker.move_log(folder)

    def close_workers(self) -> None:
        """Close the worker group of the last generation without starting another."""
        self._close_group()

    def announce_store(self, address: str) -> None:
        if self.worker_group is not None:
            self.worker_group.announce_store(address)

    def fence(self) -> None:
        if self.worker_group is not None:
            self.worker_group.fence()

    @property
    def group_status(self) -> WorkerGroupStatus:
        if self.worker_group is None:
            return WorkerGroupStatus()
        workers = self.worker_group.workers
        return WorkerGroupStatus(
            num_left=self.worker_group.num_left,
            failed_at=self.worker_group.failed_at,
            has_silent_death=any(worker.died_silently for worker in workers),
            all_reported=self.worker_group.all_reported,
        )

    def worker_reports(self) -> list[WorkerReport]:
        return self.worker_group.worker_reports() if self.worker_group else []

    def worker_views(self) -> list[WorkerView]:
        return [
            WorkerView(worker.world.rank, self.name, worker.pid, worker.progress, worker.world.local_rank)
            for worker in self.workers
        ]

    def tick(self, now: float) -> float | None:
        """Reap orphans and check that the zygote responds; returns when to call it again."""
        self._zygote_client.reap()
        return self._zygote_client.check_alive(now)

    def drop_old_snapshots(self) -> None:
        """Every rank has a snapshot of its own: free what earlier, larger generations left for other local ranks."""
        self.snapshot_memory.shrink(len(self.workers))

    def _close_group(self) -> None:
        group, self.worker_group = self.worker_group, None
        if group is not None:
            group.__exit__(None, None, None)

    def __enter__(self) -> LocalHost:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._close_group()
        finally:
            self._zygote_client.__exit__(kind, error, tb)
            self.snapshot_memory.close()
