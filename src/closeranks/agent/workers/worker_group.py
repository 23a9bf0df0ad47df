"""The worker group: the workers of one generation on this host, and their state.

Invariant: when a worker group is closed, none of its workers is alive. The zygote client outlives it: the next
generation is another worker group, forked from the same zygote.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from closeranks.agent.detection.exit_status import num_oom_kills
from closeranks.agent.detection.root_cause import WorkerReport
from closeranks.agent.event_loop import EventLoop
from closeranks.agent.launch_plan import AgentCallbacks, LaunchPlan
from closeranks.agent.workers.worker_process import WorkerProcess, WorkerSetup
from closeranks.agent.workers.zygote_client import ZygoteClient
from closeranks.core.world import World

_CLOSE_S = 5.0


class WorkerGroup:
    """All workers of one generation on this host. The constructor asks the zygote to fork them."""

    def __init__(
        self,
        plan: LaunchPlan,
        worlds: Sequence[World],
        zygote_client: ZygoteClient,
        loop: EventLoop,
        callbacks: AgentCallbacks,
        setup: WorkerSetup | None = None,
    ) -> None:
        self._zygote_client = zygote_client
        self._loop = loop
        self._callbacks = callbacks
        self._num_oom_kills = num_oom_kills()
        setup = setup or WorkerSetup(plan.payload, plan.config.host, [], self.announce_store)
        self.workers = [WorkerProcess(world, plan, loop, callbacks, setup) for world in worlds]
        for worker in self.workers:
            zygote_client.fork(worker, worker.fds)

    def announce_store(self, address: str) -> None:
        for worker in self.workers:
            worker.send({"type": "store", "address": address})

    def fence(self) -> None:
        """Send SIGKILL to all live workers, and cancel the forks that have not been requested yet."""
        for worker in self.workers:
            worker.fence()
        self._zygote_client.cancel()

    @property
    def num_left(self) -> int:
        return sum(not worker.is_over for worker in self.workers)

    @property
    def failed_at(self) -> float | None:
        return min((worker.failed_at for worker in self.workers if worker.failed_at is not None), default=None)

    @property
    def all_reported(self) -> bool:
        return all(worker.has_reported for worker in self.workers)

    def worker_reports(self) -> list[WorkerReport]:
        return [worker.report() for worker in self.workers]

    @property
    def num_oom_kills(self) -> int:
        """How many processes of this host the out-of-memory killer has ended since this generation began."""
        return num_oom_kills() - self._num_oom_kills

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Fence the workers that are left, without callbacks. There are some only when an error propagates."""
        if self.num_left:
            for worker in self.workers:
                worker.listener = _NO_CALLBACKS
            self.fence()
            self._await_ends()
        for worker in self.workers:
            worker.close()

    def _await_ends(self) -> None:
        deadline = time.monotonic() + _CLOSE_S
        while self.num_left and time.monotonic() < deadline:
            self._loop.run_once(deadline)


def _ignore(*_: Any) -> None:
    """An error is propagating already; what workers report while they are killed adds nothing."""


_NO_CALLBACKS = AgentCallbacks(on_event=_ignore, on_output=_ignore, on_note=_ignore)
