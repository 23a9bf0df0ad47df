"""Trains the job of a soak test and injects faults into it by the clock.

    python benchmarks/soak_lane.py ORDERS.json

``closeranks train`` with a callback in the agent's loop, as in a drill; but a fault is due at a second, not at a step,
also while ranks are being closed. Invariants: each planned fault is injected once, as soon after its second as its
target runs; when the last calm period is over the run is drained, so that its last state is saved; whatever a fault set
up is removed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from soak_plan import Plan, Planned, Window

from closeranks.agent.job_view import JobView
from closeranks.core.errors import Drained
from closeranks.elastic.faults.disk import FillableDisk
from closeranks.elastic.faults.fault import InjectedFault
from closeranks.elastic.faults.fault_actions import FAULT_ACTIONS, FaultAction
from closeranks.elastic.faults.observed_run import step_of
from closeranks.run.job import launch
from closeranks.telemetry.run_log.run_folder import RunFolder

_FIRST_STEPS = 5
"""The clock begins when these are done: what they take is no rate."""
_POLL_S, _RETRY_S = 0.25, 0.01
_LASTS = {"slow": 5, "diskfull": 45}
"""Steps; a save must meet the full disk."""


@dataclass(frozen=True, slots=True)
class Orders:
    job: str
    overrides: tuple[str, ...]
    num_workers: int
    run: str
    strikes: str
    """Where each strike is written down, after a first line with the time at which the clock began."""
    plan: Plan


@dataclass(slots=True)
class _ActiveFault:
    planned: Planned
    fault: InjectedFault
    action: FaultAction
    generation: int
    step: int
    is_recorded: bool = False


class Striker:
    """Called at every turn of the agent's loop; answers when it wants to be called again."""

    def __init__(self, plan: Plan, strikes: Path, run: Path) -> None:
        self._plan = plan
        self._due = list(plan.faults)
        self._active: list[_ActiveFault] = []
        self._file = strikes
        self._run = RunFolder(run)
        self._began_at: float | None = None
        self._is_open = self._is_over = False
        has_disk = any(fault.kind == "diskfull" for fault in plan.faults)
        self._disk = FillableDisk(self._run.checkpoints) if has_disk else None

    def __call__(self, view: JobView) -> float | None:
        if not self._is_open:
            self._is_open = True
            if self._disk is not None:
                self._disk.open()
        if self._began_at is None:
            if not self._is_settled(view):
                return view.now + _POLL_S
            self._began_at = view.now
            self._write({"began_at": time.time()})
        now_s = view.now - self._began_at
        for one in list(self._active):
            self._advance(one, view)
        for planned in [planned for planned in self._due if planned.at_s <= now_s]:
            self._begin(planned, view)
        if now_s >= self._plan.ends_s and not self._is_over:
            self._is_over = True
            os.kill(os.getpid(), signal.SIGTERM)
        return self._next_at(view.now, now_s)

    def _is_settled(self, view: JobView) -> bool:
        log = self._run.path / "logs" / "zygote.log"
        if view.state != "running" or any((one.progress.step or 0) <= _FIRST_STEPS for one in view.local_workers):
            return False
        return log.exists() and "warmed up" in log.read_text()

    def _next_at(self, now: float, now_s: float) -> float | None:
        if self._is_over:
            return None
        if any(one.action.is_urgent for one in self._active):
            return now
        coming = [self._plan.ends_s, *(planned.at_s for planned in self._due)]
        waits = [_POLL_S] if self._active else []
        if min(coming) <= now_s:
            waits.append(_RETRY_S)
        return now + min([*waits, max(_RETRY_S, min(coming) - now_s)])

    def _begin(self, planned: Planned, view: JobView) -> None:
        """Who is not there now, or has nothing yet that could be struck, is tried again."""
        fault = InjectedFault(planned.kind, 1, planned.rank, planned.other)
        step = step_of(view, fault)
        if fault.kind in _LASTS:
            if step is None:
                return
            fault = replace(fault, step=step, steps=_LASTS[fault.kind])
        try:
            action = FAULT_ACTIONS[planned.kind](fault, view, self._disk)
        except OSError:
            return
        self._due.remove(planned)
        one = _ActiveFault(planned, fault, action, view.generation, step or 0)
        self._active.append(one)
        self._advance(one, view)

    def _advance(self, one: _ActiveFault, view: JobView) -> None:
        try:
            is_over = one.action.tick(view)
        except OSError:  # the victim went away in the middle of it
            is_over = True
        if one.action.injected_at is not None and not one.is_recorded:
            one.is_recorded = True
            record = {
                **asdict(one.planned),
                "at": one.action.injected_at,
                "generation": one.generation,
                "step": one.step,
            }
            self._write({**record, "state": view.state, "note": one.action.note})
        if is_over:
            try:
                one.action.undo()
            except OSError:
                one.action.is_urgent = False  # tried again at the next turn, and by ``close``
                return
            self._active.remove(one)
            if not one.is_recorded:  # the target was gone before the fault took effect
                self._due.append(one.planned)

    def _write(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        with ExitStack() as stack:
            if self._disk is not None:
                stack.callback(self._disk.close)
            for one in self._active:
                stack.callback(one.action.undo)


def write_orders(orders: Orders, path: Path) -> None:
    path.write_text(json.dumps(asdict(orders), indent=1))


def read_orders(path: Path) -> Orders:
    fields = json.loads(path.read_text())
    windows = tuple(Window(**window) for window in fields["plan"]["windows"])
    plan = Plan(windows, tuple(Planned(**fault) for fault in fields["plan"]["faults"]))
    return Orders(**{**fields, "overrides": tuple(fields["overrides"]), "plan": plan})


def main(arguments: Sequence[str]) -> int:
    orders = read_orders(Path(arguments[0]))
    striker = Striker(orders.plan, Path(orders.strikes), Path(orders.run))
    try:
        launch.train(Path(orders.job), orders.overrides, orders.num_workers, on_tick=striker)
    except Drained:
        return 0
    finally:
        striker.close()
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
