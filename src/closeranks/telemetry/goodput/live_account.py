"""The account of a run while it goes, from the events of rank 0 and of the agent as they arrive.

Invariant: nothing is read again: earlier commands of the run are known by the account that they left in the status
file, and a status costs the same after a million steps as after ten. All ranks are taken to be like rank 0, so waiting
for the slowest rank is not told apart here; a report reads more ranks.
"""

from __future__ import annotations

from closeranks.core.events import Event, RunStarted
from closeranks.telemetry.goodput.rank_record import RankRecord
from closeranks.telemetry.goodput.run_account import AGENT_EVENTS, build_account
from closeranks.telemetry.goodput.time_account import TimeAccount, merged
from closeranks.telemetry.run_log.fault_history import TimedEvent


class LiveAccount:
    def __init__(self, earlier: TimeAccount | None = None, num_done: int = 0) -> None:
        """``earlier``: the account of the run's earlier commands, and ``num_done`` the steps they had finished."""
        self._earlier, self._num_done = earlier, num_done
        self._num_redone: int | None = None
        self._record = RankRecord()
        self._agent: list[TimedEvent] = []

    def add(self, at: float, event: Event) -> None:
        if isinstance(event, AGENT_EVENTS):
            self._agent.append(TimedEvent(at, event))
            return
        self._record.add(at, event)
        if isinstance(event, RunStarted) and self._num_redone is None:
            self._num_redone = max(0, self._num_done - event.first_step)

    def account(self) -> TimeAccount:
        own = build_account({0: self._record}, self._agent)
        return own if self._earlier is None else merged(self._earlier, own, num_redone=self._num_redone or 0)
