"""Reconstructs what happened in a run from its folder. Pure but for ``load_history``.

Invariant: each step counts once. A run that went back (a fault, a resume) records steps again; the later record of a
step replaces the earlier one, as the weights do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from closeranks.core.events import (
    Compressed,
    Evaluated,
    Event,
    FlopsCounted,
    NoiseSeen,
    Restored,
    Resumed,
    RunEnded,
    RunStarted,
    Saved,
    SaveFailed,
    Snapshotting,
    StepDone,
    Warned,
    decode,
)
from closeranks.telemetry.live.throughput import with_known_flops
from closeranks.telemetry.run_log.fault_history import FaultHistory, TimedEvent, fault_history
from closeranks.telemetry.run_log.gaps import damaged_lines, lacking_steps
from closeranks.telemetry.run_log.recorder import lines_of, parse_line, read_events
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.run_log.step_blocks import StepBlock, append_block, step_figures
from closeranks.telemetry.run_log.step_reader import RankLog, other_logs

REGROUPED = "regrouped"
"""The reason of a generation that ended by agreement so that another takes over: the run continues."""
_RANKS_SEARCHED = 64
"""Warnings of ranks beyond these are not collected: reading every file of a large run would take minutes."""


@dataclass(frozen=True, slots=True)
class GenerationStart:
    """One generation: how it began, and the time until its last event or until the next generation took over."""

    started: RunStarted
    heard_s: float
    at: float = 0.0
    """On the wall clock."""


@dataclass(frozen=True, slots=True)
class WarningCount:
    """A warning, how often it was emitted, and by which ranks."""

    what: str
    times: int
    ranks: tuple[int, ...]
    first_step: int | None


@dataclass(frozen=True, slots=True)
class Throughput:
    """Excludes the first step of each process. ``items_per_s`` is None if no step is left."""

    items: int = 0
    seconds: float = 0.0
    first_steps_s: float = 0.0

    @property
    def items_per_s(self) -> float | None:
        return self.items / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True, slots=True)
class PauseTimes:
    """Time spent between steps."""

    evals_s: float = 0.0
    saves_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunHistory:
    starts: tuple[GenerationStart, ...] = ()
    steps: tuple[StepDone, ...] = ()
    """All steps; of a long run a sample, evenly spread, with the first and the last step of each session."""
    first_steps: frozenset[int] = frozenset()
    """Steps that were the first of their process: they include warm-up and compile."""
    evals: tuple[Evaluated, ...] = ()
    saves: tuple[Saved, ...] = ()
    resumed: tuple[Resumed, ...] = ()
    warnings: tuple[WarningCount, ...] = ()
    ended: RunEnded | None = None
    pauses: PauseTimes = PauseTimes()
    restored: tuple[Restored, ...] = ()
    compressed: tuple[Compressed, ...] = ()
    snapshots: Snapshotting | None = None
    """How snapshots were kept in memory, as decided last."""
    fault_history: FaultHistory = field(default_factory=FaultHistory)
    noise: NoiseSeen | None = None
    """The last conclusive measurement of the noise scale."""
    flops_counted: FlopsCounted | None = None
    blocks: tuple[StepBlock, ...] = ()
    """Of a long run: all steps, in order, summed up in blocks."""
    notes: tuple[str, ...] = ()
    """What of the metrics was not read, or could not be, in sentences."""

    @property
    def started(self) -> RunStarted | None:
        return self.starts[-1].started if self.starts else None

    @property
    def taken(self) -> tuple[StepDone, ...]:
        return tuple(step for step in self.steps if step.taken)

    @property
    def num_steps(self) -> int:
        return sum(block.num for block in self.blocks) if self.blocks else len(self.steps)

    @property
    def num_skipped(self) -> int:
        if self.blocks:
            return sum(block.num_skipped for block in self.blocks)
        return len(self.steps) - len(self.taken)

    @property
    def counted(self) -> tuple[StepDone | StepBlock, ...]:
        """All steps, whose figures can be added up: one by one, or in blocks."""
        return self.blocks or self.steps

    @property
    def seconds(self) -> float:
        """Wall-clock time of all generations; the run's own figure if there was only one and it ended."""
        if self.ended is not None and len(self.starts) <= 1 and self.ended.seconds > 0:
            return self.ended.seconds
        return sum(start.heard_s for start in self.starts)

    @property
    def restarts(self) -> tuple[int, ...]:
        """Steps from which the run was started again. Faults that the agent recorded are in ``fault_history``."""
        later = [start.started for start in self.starts[1:]]
        return tuple(one.first_step for one in later if not one.generation or not self.fault_history.faults)

    @property
    def typical_step_s(self) -> float:
        """The median step time, without the first step of each process; 0 if there is none."""
        times = sorted(step.seconds for step in self.steps if step.step not in self.first_steps)
        return times[len(times) // 2] if times else 0.0

    @property
    def lost_s(self) -> float:
        """Time that faults cost."""
        return self.fault_history.lost_s(self.typical_step_s)

    def throughput(self) -> Throughput:
        first = [step for step in self.steps if step.step in self.first_steps]
        first_steps_s = sum(step.seconds for step in first)
        return Throughput(
            items=sum(step.items for step in self.counted) - sum(step.items for step in first),
            seconds=max(0.0, sum(step.seconds for step in self.counted) - first_steps_s),
            first_steps_s=first_steps_s,
        )


class _HistoryBuilder:
    """Folds rank 0's events, in order, into the final history."""

    def __init__(self) -> None:
        self.starts: list[RunStarted] = []
        self.intervals: list[tuple[float, float]] = []
        self.steps: dict[int, StepDone] = {}
        self.first_steps: set[int] = set()
        self.evals: dict[int, Evaluated] = {}
        self.saves: dict[int, Saved] = {}
        self.resumed: list[Resumed] = []
        self.restored: list[Restored] = []
        self.snapshots: Snapshotting | None = None
        self.compressed: dict[int, Compressed] = {}
        self.noise: NoiseSeen | None = None
        self.flops_counted: FlopsCounted | None = None
        self.ended: RunEnded | None = None
        self.evals_s = self.saves_s = 0.0
        self.blocks: list[StepBlock] = []

    def add_block(self, block: StepBlock) -> None:
        """After its lines, as far as they were read."""
        if self.intervals:
            self.intervals[-1] = (self.intervals[-1][0], max(block.at, self.intervals[-1][1]))
        if block.num:
            append_block(self.blocks, block)

    def add(self, event: Event | None, at: float) -> None:
        match event:
            case RunStarted():
                self._begin(event, at)
            case FlopsCounted() if self.starts:
                self.starts[-1], self.flops_counted = event.added_to(self.starts[-1]), event
            case StepDone():
                self.steps[event.step] = event
            case Evaluated():
                self.evals[event.step] = event
                self.evals_s += event.seconds
            case Saved():
                self.saves.pop(event.step, None)  # the latest save comes last, whatever its step
                self.saves[event.step] = event
                self.saves_s += event.stall_s
            case Resumed():
                self.resumed.append(event)
            case Restored():
                self.restored.append(event)
            case Snapshotting():
                self.snapshots = event
            case Compressed():
                self.compressed[event.step] = event
            case NoiseSeen():
                self.noise = event if event.noise_scale is not None else self.noise
            case RunEnded():
                self.ended = event if event.reason != REGROUPED else None
        if self.intervals:
            self.intervals[-1] = (self.intervals[-1][0], max(at, self.intervals[-1][1]))

    def _begin(self, started: RunStarted, at: float) -> None:
        self._rewind_to(started.first_step)
        if started.generation and self.intervals:  # recovery time belongs to the run
            first, last = self.intervals[-1]
            self.intervals[-1] = (first, max(at, last))
        self.starts.append(with_known_flops(started, self.starts[-1]) if self.starts else started)
        self.intervals.append((at, at))
        self.ended = None

    def _rewind_to(self, step: int) -> None:
        self.steps = {number: done for number, done in self.steps.items() if number <= step}
        self.evals = {number: done for number, done in self.evals.items() if number <= step}
        self.first_steps = {number for number in self.first_steps if number <= step} | {step + 1}
        while self.blocks and self.blocks[-1].first > step:
            self.blocks.pop()
        if self.blocks and self.blocks[-1].last > step:  # such a block is always read step by step
            block = self.blocks.pop()
            kept = [done for number, done in self.steps.items() if number >= block.first]
            self.blocks += [replace(block, **step_figures(kept))] if kept else []

    def history(self, warnings: tuple[WarningCount, ...], faults: FaultHistory) -> RunHistory:
        times = zip(self.starts, self.intervals, strict=True)
        return RunHistory(
            starts=tuple(GenerationStart(started, last - first, first) for started, (first, last) in times),
            steps=tuple(self.steps[number] for number in sorted(self.steps)),
            first_steps=frozenset(self.first_steps & self.steps.keys()),
            evals=tuple(self.evals[number] for number in sorted(self.evals)),
            saves=tuple(self.saves.values()),
            resumed=tuple(self.resumed),
            warnings=warnings,
            ended=self.ended,
            pauses=PauseTimes(self.evals_s, self.saves_s),
            restored=tuple(self.restored),
            compressed=tuple(self.compressed[number] for number in sorted(self.compressed)),
            snapshots=self.snapshots,
            fault_history=faults,
            noise=self.noise,
            flops_counted=self.flops_counted,
            blocks=tuple(self.blocks),
        )


def build_history(
    lines: Iterable[tuple[dict[str, Any], Event | None] | StepBlock],
    others: Iterable[dict[str, Any]] = (),
    agent: Iterable[TimedEvent] = (),
) -> RunHistory:
    """Rank 0's lines as a history, each block after its lines; ``others`` are the warnings of further ranks, ``agent``
    the agent's events."""
    state = _HistoryBuilder()
    warned: list[dict[str, Any]] = []
    for line in lines:
        if isinstance(line, StepBlock):
            state.add_block(line)
            continue
        fields, event = line
        state.add(event, float(fields.get("at", 0.0)))
        if isinstance(event, Warned | SaveFailed):
            warned.append({**fields, "generation": state.starts[-1].generation if state.starts else 0})
    return state.history(_gather([*warned, *others]), fault_history(agent))


def _gather(warned: Iterable[dict[str, Any]]) -> tuple[WarningCount, ...]:
    """Merges equal texts into one warning, in the order of first occurrence.

    A warning that a later generation repeats at its start is the same warning again, not another.
    """
    by_text: dict[str, list[dict[str, Any]]] = {}
    for fields in warned:
        times = by_text.setdefault(_words(fields), [])
        if not times or not fields.get("generation") or fields.get("step") is not None:
            times.append(fields)
    return tuple(
        WarningCount(
            what=what,
            times=len(times),
            ranks=tuple(sorted({int(fields.get("rank", 0)) for fields in times})),
            first_step=min((fields["step"] for fields in times if fields.get("step") is not None), default=None),
        )
        for what, times in by_text.items()
    )


def _words(fields: dict[str, Any]) -> str:
    what = str(fields.get("what", ""))
    return f"a save failed: {what}" if fields.get("event") == SaveFailed.name else what


def load_history(folder: Path, *, all_steps: bool = False) -> RunHistory:
    """The history in a run folder; empty if rank 0 left no metrics. ``all_steps``: also those of a long run are read
    one by one, which takes about a minute for a million."""
    run = RunFolder(folder)
    log = RankLog(run.metrics(0), sys.maxsize if all_steps else None)
    logs = list(other_logs(run, run.other_metrics()[: _RANKS_SEARCHED - 1]))
    others = [fields for other in logs for fields in _warnings_in(other)]
    history = build_history(_events_of(log), others, agent_events(run))
    return replace(history, notes=(*_notes(history, (log, *logs)), *_gaps(run, history, log)))


def _events_of(log: RankLog) -> Iterator[tuple[dict[str, Any], Event | None] | StepBlock]:
    for stretch in log.stretches("others", "warnings"):
        for line in stretch.lines:
            if (values := parse_line(line)) is not None:
                yield values, decode(values)
            else:
                log.num_damaged += line.endswith(b"\n")
        if stretch.block is not None:
            yield stretch.block


def _notes(history: RunHistory, logs: Iterable[RankLog]) -> tuple[str, ...]:
    sample = (
        f"of {history.num_steps:,} steps, {len(history.steps):,} were read one by one, evenly spread; sums and curves "
        "are of all steps"
    )
    return (*([sample] if history.blocks else []), *(log.note for log in logs if log.note))


def _gaps(run: RunFolder, history: RunHistory, log: RankLog) -> Iterator[str]:
    """What rank 0 and the agent did not record, or what was lost of it."""
    if not log.path.exists():
        if run.other_metrics():
            yield "the metrics of rank 0 are missing: steps, losses and events of the run are not known"
    elif history.starts or history.steps or log.num_damaged:
        yield from damaged_lines("rank 0's metrics", log.num_damaged)
        began_after = history.starts[0].started.first_step if history.starts else None
        steps = () if history.blocks else [step.step for step in history.steps]
        yield from lacking_steps(steps, began_after, len(history.starts))
    num_damaged = sum(parse_line(line) is None and line.endswith(b"\n") for line in lines_of(run.agent))
    yield from damaged_lines("the agent's events", num_damaged)


def agent_events(run: RunFolder) -> Iterator[TimedEvent]:
    """The events that the agent recorded; none if there was no agent, or nothing to record."""
    for fields, event in read_events(run.agent):
        yield TimedEvent(float(fields.get("at", 0.0)), event)


def _warnings_in(log: RankLog) -> Iterable[dict[str, Any]]:
    """Only lines that look like a warning are parsed: the rest record the same steps again."""
    for stretch in log.stretches("warnings", num_samples=0):
        for line in stretch.lines:
            if any(kind in line for kind in _ALARMS) and (fields := parse_line(line)) is not None:
                yield fields


_ALARMS = (b'"event": "warning"', b'"event": "save_failed"')
