"""A run on a simulated clock, which knows where its time went: what an account is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from closeranks.core.events import (
    Event,
    Launched,
    LaunchEnded,
    RankLost,
    RanksClosed,
    RunEnded,
    RunStarted,
    StepDone,
    StepPhases,
)
from closeranks.telemetry.goodput.rank_record import record_of
from closeranks.telemetry.goodput.run_account import build_account
from closeranks.telemetry.goodput.time_account import TimeAccount
from closeranks.telemetry.run_log.fault_history import TimedEvent

STEP = {"data": 0.01, "forward": 0.1, "backward": 0.2, "data.all_reduce": 0.03, "vote": 0.005, "optimizer": 0.02}
AFTER_VOTE = {"snapshot": 0.004, "save": 0.05}
"""A step is reported after its vote; these come later."""
FENCE_S, FORK_S = 0.04, 0.7


@dataclass
class SimulatedRun:
    num_ranks: int = 2
    slow: Mapping[int, float] = field(default_factory=dict)
    """By rank: how much longer it computes in every step; the others wait for it."""
    layout: str = ""
    now: float = 1000.0
    ranks: dict[int, list[tuple[float, Event | None]]] = field(default_factory=dict)
    agent: list[TimedEvent] = field(default_factory=list)
    true: Counter[str] = field(default_factory=Counter)
    """Worker-seconds by row."""
    has_launch_events: bool = True
    _generation: int = 0
    _launched_at: float = 0.0
    _useful: dict[int, float] = field(default_factory=dict)
    """By step, over all ranks."""
    _waits: dict[int, float] = field(default_factory=dict)
    _noticed_at: float | None = None
    _previous: dict[int, StepPhases] | None = None
    """Phases that were not written yet."""
    _num_done: int = 0

    def account(self) -> TimeAccount:
        return build_account({rank: record_of(events) for rank, events in self.ranks.items()}, self.agent)

    def truth(self) -> dict[str, float]:
        return {**self.true, "useful": sum(self._useful.values())}

    def spend(self, row: str, seconds: float) -> None:
        self.now += seconds
        self.true[row] += self.num_ranks * seconds

    def emit(self, event: Event, rank: int | None = None) -> None:
        for each in range(self.num_ranks) if rank is None else (rank,):
            self.ranks.setdefault(each, []).append((self.now, event))

    def launch(self, first_step: int = 0, start_s: float = 3.0) -> None:
        self._generation, self._launched_at = 0, self.now
        self.spend("start", start_s)
        self._open(first_step, process_s=start_s if not self.has_launch_events else 0.5)
        if self.has_launch_events:
            heard_at = self.now + 0.01  # the agent hears of it a moment later
            self.agent.append(TimedEvent(heard_at, Launched(heard_at - self._launched_at)))
        self.spend("start", 0.1)

    def _open(self, first_step: int, process_s: float = 0.0) -> None:
        self._redo(first_step)
        started = RunStarted(
            world_size=self.num_ranks,
            generation=self._generation,
            first_step=first_step,
            last_step=1000,
            layout=self.layout,
            global_batch=8,
            process_s=process_s,
        )
        self.emit(started)
        self._num_done, self._previous = first_step, None

    def _redo(self, first_step: int) -> None:
        for step in [step for step in self._useful if step > first_step]:
            waited = self._waits.pop(step)
            self.true["straggler"] -= waited
            self.true["redone"] += self._useful.pop(step) + waited

    def steps(self, num: int, *, taken: bool = True) -> None:
        for _ in range(num):
            self._step(taken)

    def _step(self, taken: bool) -> None:
        longest = max(self.slow.values(), default=0.0)
        phases: dict[int, StepPhases] = {}
        step = self._num_done + 1
        useful_s = waited_s = 0.0
        for rank in range(self.num_ranks):
            own = self.slow.get(rank, 0.0)
            times = {**STEP, "forward": STEP["forward"] + own, **AFTER_VOTE}
            times["data.all_reduce"] += longest - own
            phases[rank] = StepPhases(step, sum(times.values()), times)
            useful_s += sum(STEP.values()) - STEP["data"] + own
            waited_s += longest - own
            for row in ("data", "snapshot", "save"):
                self.true[row] += times[row]
        seconds = sum(STEP.values()) + longest
        self.now += seconds
        self.emit(StepDone(step, seconds=seconds, taken=taken, items=100))
        if self._noticed_at is not None:
            closed = RanksClosed(self._generation, step, self.now - self._noticed_at, world_size=self.num_ranks)
            self.agent.append(TimedEvent(self.now, closed))
            self._noticed_at = None
        self._emit_phases()
        self._previous, self._num_done = phases, step
        self.now += sum(AFTER_VOTE.values())
        if taken:
            self._useful[step], self._waits[step] = useful_s, waited_s
            self.true["straggler"] += waited_s
        else:
            self.true["skipped"] += useful_s + waited_s

    def _emit_phases(self) -> None:
        for rank, phases in (self._previous or {}).items():
            self.emit(phases, rank)
        self._previous = None

    def fault(self, *, cut_s: float = 0.2, detected_s: float = 0.5, back_to: int | None = None) -> None:
        """All workers are killed within a step; the last finished step never reports its phases, which is a loss of
        their details and not of its time."""
        lost = sum(AFTER_VOTE.values())
        for row, seconds in AFTER_VOTE.items():
            self.true[row] -= self.num_ranks * seconds
        self.true["redone"] += self.num_ranks * lost  # nothing tells it from the step that was cut short
        self.true["data"] -= self.num_ranks * STEP["data"]
        waited = self._waits[self._num_done]  # without phases nobody knows who waited
        self._waits[self._num_done] = 0.0
        self.true["straggler"] -= waited
        self._useful[self._num_done] += self.num_ranks * STEP["data"] + waited
        self.spend("redone", cut_s)
        self.spend("detection", detected_s)
        self._noticed_at = self._noticed_at if self._noticed_at is not None else self.now
        self._previous = None
        generation, self._generation = self._generation, self._generation + 1
        self.spend("recovery", FENCE_S)
        self.agent.append(TimedEvent(self.now, RankLost(generation, 1, step=self._num_done, detected_s=detected_s)))
        self.spend("recovery", FORK_S)
        self._open(self._num_done if back_to is None else back_to)
        self.spend("recovery", 0.05)

    def fault_in_recovery(self) -> None:
        """A worker is killed before the first step after a fault."""
        self.agent.append(TimedEvent(self.now, RankLost(self._generation, 0, step=self._num_done)))
        self._generation += 1
        self.spend("recovery", FORK_S)
        self._open(self._num_done)
        self.spend("recovery", 0.05)

    def end(self, seconds: float = 0.4) -> None:
        self._emit_phases()
        self.emit(RunEnded(self._num_done, "finished"))
        if self.has_launch_events:
            self.spend("end", seconds)
            self.agent.append(TimedEvent(self.now, LaunchEnded("finished")))

    def pause(self, seconds: float) -> None:
        """Between two commands: no worker exists."""
        self.now += seconds
