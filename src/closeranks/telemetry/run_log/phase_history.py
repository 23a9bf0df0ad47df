"""Reads where the time of a run's steps went, for every rank. Pure but for ``load_phases``.

Invariant: each step counts once: the later record of a step that was redone replaces the earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

from closeranks.core.events import StepPhases, decode
from closeranks.telemetry.run_log.recorder import lines_of, parse_line
from closeranks.telemetry.run_log.run_folder import RunFolder

_RANKS_READ = 64
"""Reading every file of a large run would take minutes; ranks that do the same work differ little."""
_MARK = f'"event": "{StepPhases.name}"'.encode()


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The seconds per step of one phase, over the steps of all ranks."""

    name: str
    share: float
    """Of the time of all steps."""
    median_s: float
    p99_s: float
    slowest_rank: int
    """The rank that spent most time in it,"""
    slowest_s: float
    """on average per step,"""
    mean_s: float
    """and the mean of all ranks."""


@dataclass(frozen=True, slots=True)
class PhaseHistory:
    steps: Mapping[int, Mapping[int, StepPhases]]
    """By rank, then by step."""

    def table(self, skipped: frozenset[int] = frozenset()) -> tuple[PhaseTimes, ...]:
        """All phases, longest first. ``skipped``: steps that do not count, such as the first of each process."""
        counted = {
            rank: [one for number, one in steps.items() if number not in skipped] for rank, steps in self.steps.items()
        }
        total_s = sum(one.seconds for steps in counted.values() for one in steps)
        names = dict.fromkeys(name for steps in counted.values() for one in steps for name in one.phases)
        found = [_phase_times(name, counted, total_s) for name in names] if total_s else []
        return tuple(sorted(found, key=lambda one: -one.share))


def _phase_times(name: str, steps: Mapping[int, list[StepPhases]], total_s: float) -> PhaseTimes:
    means = {rank: sum(one.phases.get(name, 0.0) for one in own) / len(own) for rank, own in steps.items() if own}
    times = [one.phases.get(name, 0.0) for own in steps.values() for one in own]
    cuts = quantiles(times, n=100, method="inclusive") if len(times) > 1 else times * 99
    slowest = max(means, key=lambda rank: means[rank])
    return PhaseTimes(
        name=name,
        share=sum(times) / total_s,
        median_s=cuts[49],
        p99_s=cuts[98],
        slowest_rank=slowest,
        slowest_s=means[slowest],
        mean_s=sum(means.values()) / len(means),
    )


def collect(events: Iterable[tuple[int, StepPhases]]) -> PhaseHistory:
    """``events``: each with its rank, in the order of their recording."""
    steps: dict[int, dict[int, StepPhases]] = {}
    for rank, event in events:
        steps.setdefault(rank, {})[event.step] = event
    return PhaseHistory(steps)


def load_phases(folder: Path) -> PhaseHistory:
    """The phases in a run folder; empty if none were recorded."""
    run = RunFolder(folder)
    return collect(
        one for path in (run.metrics(0), *run.other_metrics()[: _RANKS_READ - 1]) for one in _phases_in(path)
    )


def _phases_in(path: Path) -> Iterator[tuple[int, StepPhases]]:
    for line in lines_of(path):
        if _MARK in line and (fields := parse_line(line)) is not None:
            event = decode(fields)
            if isinstance(event, StepPhases):
                yield int(fields.get("rank", 0)), event
