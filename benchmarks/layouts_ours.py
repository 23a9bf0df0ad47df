"""How does closeranks take a step under a layout? As a session that the job opens, whatever the layout.

Invariant: the loop is the same for every layout; the job's tables alone say which one it is.
"""

from __future__ import annotations

from layouts_work import LayoutWork

from closeranks.run.session import Session
from closeranks.run.worker.agent_client import StandaloneClient, configure_worker


class Ours:
    """A session as under torchrun: its loader, its recorder, nobody to report to."""

    def __init__(self, work: LayoutWork) -> None:
        configure_worker(agent_client=StandaloneClient())  # the benchmark speaks for itself
        self._session = Session.from_job(work.job)
        self._steps = iter(self._session)
        self.log_path = self._session.folder / "metrics" / "rank-00000.jsonl"

    def take_steps(self, num_steps: int) -> None:
        """Each step is committed when the next one is asked for, so a turn commits the last one of the turn before."""
        for _ in range(num_steps):
            next(self._steps).run()

    def close(self) -> None:
        self._steps.close()  # type: ignore[attr-defined]
