"""When did a run first reach its target loss (``telemetry.target_loss``), and what had it taken until then?

The evaluation loss counts if the run evaluates while it trains, else the mean training loss of the latest steps. Found
in the events of rank 0, in their order, so faults and commands that continue the run make no difference. Invariant:
once reached it stays reached, also if a fault makes the run do those steps again; another target begins anew. Pure but
for what reads a run folder.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from closeranks.core.errors import CloseranksError
from closeranks.core.events import Evaluated, Event, RunStarted, StepDone
from closeranks.facts.prices import DevicePrice
from closeranks.telemetry import formatting
from closeranks.telemetry.goodput.account_text import hours_words
from closeranks.telemetry.goodput.rank_record import RankRecord
from closeranks.telemetry.goodput.run_account import build_account, load_agent_events
from closeranks.telemetry.goodput.run_cost import find_price, money
from closeranks.telemetry.goodput.time_account import TimeAccount
from closeranks.telemetry.run_log.fault_history import TimedEvent
from closeranks.telemetry.run_log.recorder import read_events
from closeranks.telemetry.run_log.run_folder import RunFolder

EVALUATION, TRAINING = "evaluation", "training"
_WINDOW = 20
"""Steps whose mean is the training loss, or as many as the run has."""
_LOOK_BACK = 4096
"""A fault or a command that continues the run goes back by at most so many steps; else the mean begins anew."""
_BYTES_READ = 64 << 20
"""A command that continues a run reads at most so much before it starts."""


@dataclass(frozen=True, slots=True)
class LossTarget:
    """A target loss, and how far the run is."""

    value: float = 0.0
    of: str = TRAINING
    """Of what loss: ``evaluation``, or ``training``."""
    lowest: float | None = None
    """The lowest so far; None before there is any."""
    step: int | None = None
    """The first step that reached it; None: not reached yet. The figures below are up to then."""
    loss: float = 0.0
    wall_s: float = 0.0
    """As in ``TimeAccount``, over all commands and faults;"""
    worker_s: float = 0.0
    num_items: int = 0
    """of steps that count,"""
    num_samples: int = 0
    """likewise."""


class TargetWatch:
    """Takes the events of rank 0 in order. ``account`` returns the account of the run up to the latest of them."""

    def __init__(self, target: LossTarget | None = None) -> None:
        """``target``: as the earlier commands of the run left it."""
        self.target = target
        self._losses: deque[tuple[int, float]] = deque(maxlen=_LOOK_BACK)
        self._width = _WINDOW

    def add(self, event: Event | None, account: Callable[[], TimeAccount]) -> bool:
        """Whether the target is reached by this event."""
        if isinstance(event, RunStarted):
            self._begin(event)
        target = self.target
        if target is None:
            return False
        loss = self._loss(event, target)
        if loss is None or not math.isfinite(loss):
            return False
        lowest = loss if target.lowest is None else min(loss, target.lowest)
        self.target = replace(target, lowest=lowest)
        if target.step is not None or loss > target.value:
            return False
        assert isinstance(event, StepDone | Evaluated)
        self.target = _reached(self.target, event.step, loss, account())
        return True

    def _begin(self, started: RunStarted) -> None:
        kept = (one for one in self._losses if one[0] <= started.first_step)
        self._losses = deque(kept, _LOOK_BACK)
        self._width = min(_WINDOW, started.last_step or _WINDOW)
        if started.target_loss is None:
            self.target = None
        elif self.target is None or (self.target.value, self.target.of) != (started.target_loss, started.target_of):
            self.target = LossTarget(started.target_loss, started.target_of)

    def _loss(self, event: Event | None, target: LossTarget) -> float | None:
        if isinstance(event, Evaluated):
            return event.loss if target.of == EVALUATION else None
        if not isinstance(event, StepDone) or target.of == EVALUATION:
            return None
        if not event.taken or not math.isfinite(event.loss):
            return None
        self._losses.append((event.step, event.loss))
        if len(self._losses) < self._width:
            return None
        return sum(loss for _, loss in islice(reversed(self._losses), self._width)) / self._width


def _reached(target: LossTarget, step: int, loss: float, account: TimeAccount) -> LossTarget:
    return replace(
        target,
        step=step,
        loss=loss,
        wall_s=account.wall_s,
        worker_s=account.worker_s,
        num_items=account.num_items,
        num_samples=account.num_samples,
    )


def watch_events(events: Iterable[tuple[float, Event | None]], agent: Sequence[TimedEvent]) -> TargetWatch:
    """``events``: of rank 0, with their instants; ``agent``: its events."""
    record, watch, now = RankRecord(), TargetWatch(), 0.0

    def account() -> TimeAccount:
        return build_account({0: record}, [line for line in agent if line.at <= now])

    for at, event in events:
        now = max(at, now)
        record.add(at, event)
        watch.add(event, account)
    return watch


def load_target(folder: Path) -> LossTarget | None:
    """The target of a run folder; None if the job has none. Reads all that rank 0 has recorded."""
    return _load_watch(folder).target


def continued_watch(folder: Path, earlier: LossTarget | None) -> TargetWatch:
    """For a command that continues the run in this folder. ``earlier``: the target by the status that the last command
    left, which may lack what happened just before it was killed."""
    metrics = RunFolder(folder).metrics(0)
    with suppress(CloseranksError, OSError):
        if (earlier is None or earlier.step is None) and metrics.stat().st_size <= _BYTES_READ:
            return _load_watch(folder)
    return TargetWatch(earlier)


def _load_watch(folder: Path) -> TargetWatch:
    run = RunFolder(folder)
    if run.resolved().get("telemetry.target_loss") is None:
        return TargetWatch()
    lines = ((float(fields.get("at", 0.0)), event) for fields, event in read_events(run.metrics(0)))
    return watch_events(lines, load_agent_events(folder))


def target_words(target: LossTarget, price: DevicePrice | None, device: str, item: str) -> str:
    """``2.9 in evaluation: reached at step 120, after 3 min 2 s and 1.23M tokens, 0.101 GPU-hours, $0.38``."""
    goal = f"{target.value:g} in {target.of}"
    if target.step is None:
        lowest = "" if target.lowest is None else f" (lowest so far {formatting.number(target.lowest)})"
        return f"{goal}: not reached{lowest}"
    spent = TimeAccount(worker_s=target.worker_s)
    seen = [f"{formatting.compact(target.num_items)} {item}s"]
    if item != "sample":
        seen.append(f"{formatting.compact(target.num_samples)} samples")
    cost = [money(price.cost(spent.device_hours), price.currency)] if price is not None else []
    figures = ", ".join([*seen, hours_words(spent, device), *cost])
    return f"{goal}: reached at step {target.step}, after {formatting.duration(target.wall_s)} ({figures})"


def tell_target(folder: Path, tell: Callable[[str], None]) -> None:
    """At the end of a run: whether it has reached its target, if it has one."""
    with suppress(CloseranksError, OSError):
        target = load_target(folder)
        if target is not None:
            events = (event for _, event in read_events(RunFolder(folder).metrics(0)))
            started = next((event for event in events if isinstance(event, RunStarted)), RunStarted())
            price, _ = find_price(folder, started.device)
            tell(f"target loss {target_words(target, price, started.device, started.item)}")
