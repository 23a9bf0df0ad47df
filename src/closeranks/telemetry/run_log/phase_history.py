"""Reads where the time of a run's steps went, for every rank. Pure but for ``load_phases``.

Invariant: each step counts once: the later record of a step that was redone replaces the earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

from closeranks.core.events import StepPhases, decode
from closeranks.telemetry.run_log.gaps import lacking_phases
from closeranks.telemetry.run_log.recorder import parse_line
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.run_log.step_blocks import StepBlock, append_block
from closeranks.telemetry.run_log.step_reader import OTHER_SAMPLES, RankLog, other_logs

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
    """By rank, then by step; of a long run a sample, evenly spread."""
    blocks: Mapping[int, tuple[StepBlock, ...]] = field(default_factory=dict)
    """By rank: all steps of a long run, summed up in blocks."""

    def gaps(self, num_generations: int) -> tuple[str, ...]:
        """What ranks did not record, in sentences; of a long run it is not known."""
        return () if self.blocks else tuple(lacking_phases(self.steps, num_generations))

    def means(self, skipped: frozenset[int] = frozenset()) -> dict[int, list[StepPhases]]:
        """By rank, in order: all steps, or the mean step of each block. ``skipped`` as for ``table``, and with them the
        whole block in which a session begins."""
        found = {}
        for rank, steps in sorted(self.steps.items()):
            blocks = [block for block in self.blocks.get(rank, ()) if block.start is None]
            counted = [one for number, one in sorted(steps.items()) if number not in skipped]
            found[rank] = [block.mean_phases() for block in blocks] or counted
        return {rank: own for rank, own in found.items() if own}

    def table(self, skipped: frozenset[int] = frozenset()) -> tuple[PhaseTimes, ...]:
        """All phases, longest first. ``skipped``: steps that do not count, such as the first of each process. Of a long
        run, shares and means are of all steps, medians and quantiles of the sample."""
        counted = {
            rank: [one for number, one in steps.items() if number not in skipped] for rank, steps in self.steps.items()
        }
        means = self.means(skipped)
        total_s = sum(one.seconds for steps in means.values() for one in steps)
        names = dict.fromkeys(name for steps in means.values() for one in steps for name in one.phases)
        found = [_phase_times(name, counted, means, total_s) for name in names] if total_s else []
        return tuple(sorted(found, key=lambda one: -one.share))


_Steps = Mapping[int, list[StepPhases]]


def _phase_times(name: str, steps: _Steps, all_means: _Steps, total_s: float) -> PhaseTimes:
    spent_s = {rank: sum(one.phases.get(name, 0.0) for one in own) for rank, own in all_means.items()}
    means = {rank: spent_s[rank] / len(own) for rank, own in all_means.items()}
    times = [one.phases.get(name, 0.0) for own in steps.values() for one in own]
    cuts = quantiles(times, n=100, method="inclusive") if len(times) > 1 else times * 99
    slowest = max(means, key=lambda rank: means[rank])
    return PhaseTimes(
        name=name,
        share=sum(spent_s.values()) / total_s,
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
    first, others = RankLog(run.metrics(0)), other_logs(run, run.other_metrics()[: _RANKS_READ - 1])
    blocks: dict[int, list[StepBlock]] = {}
    history = collect(
        one for log in (first, *others) for one in _phases_in(log, blocks, None if log is first else OTHER_SAMPLES)
    )
    return PhaseHistory(history.steps, {rank: tuple(own) for rank, own in blocks.items()})


def _phases_in(
    log: RankLog, blocks: dict[int, list[StepBlock]], num_samples: int | None
) -> Iterator[tuple[int, StepPhases]]:
    for stretch in log.stretches(num_samples=num_samples):
        for line in stretch.lines:
            if _MARK in line and (fields := parse_line(line)) is not None:
                event = decode(fields)
                if isinstance(event, StepPhases):
                    yield int(fields.get("rank", 0)), event
        if stretch.block is not None and stretch.block.num and stretch.block.num_phases:
            append_block(blocks.setdefault(log.rank, []), stretch.block)
