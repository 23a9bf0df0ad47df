"""The result of a comparison: a table with a row for each setting. Pure.

Invariants: means and spreads are over the runs that finished, and a setting with any other run says so in words;
settings are compared with the baseline run by run, with equal seeds, so that the effect of a seed on both cancels;
final figures come all from evaluations or all from training, never from a mix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from closeranks.lab.compare.config import CompareConfig
from closeranks.lab.compare.run_outcome import ComparisonRunOutcome

Figure = Callable[[ComparisonRunOutcome], float | None]


@dataclass(frozen=True, slots=True)
class RunStat:
    """A figure over several runs."""

    mean: float
    spread: float
    """The standard deviation; 0 for a single run."""
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> RunStat | None:
        """None if there is no finite value."""
        known = [value for value in values if value is not None and math.isfinite(value)]
        if not known:
            return None
        spread = stdev(known) if len(known) > 1 else 0.0
        return cls(mean(known), spread, min(known), max(known), len(known))


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting."""

    name: str
    num_workers: int
    num_runs: int
    num_sound: int
    """Runs that finished with a finite loss."""
    reason: str = ""
    """What happened to the other runs, in words."""
    num_seeds: int = 0
    num_steps: float = 0.0
    """The mean over the runs that finished."""
    steps_per_s: RunStat | None = None
    rate_ratio: float | None = None
    """Steps per second, divided by those of the baseline."""
    items_per_s: RunStat | None = None
    staleness: RunStat | None = None
    bytes_per_step: RunStat | None = None
    bytes_ratio: float | None = None
    seconds: RunStat | None = None
    """Of the whole training."""
    seconds_ratio: RunStat | None = None
    """The baseline's seconds divided by these, seed by seed: how many times as fast this setting is."""
    seconds_to_target: RunStat | None = None
    """Only if every run that finished reached the target."""
    num_reached: int = 0
    speedup: RunStat | None = None
    """The baseline's time to the target divided by this one, seed by seed."""
    final: RunStat | None = None
    """The loss, or the target's metric, at the end."""
    final_gap: RunStat | None = None
    """``final`` minus that of the baseline, seed by seed."""
    final_loss: RunStat | None = None
    eval_loss: RunStat | None = None
    memory_bytes: RunStat | None = None
    cost: RunStat | None = None
    cost_to_target: RunStat | None = None

    @property
    def is_sound(self) -> bool:
        return self.num_sound == self.num_runs

    @property
    def has_reached(self) -> bool:
        return self.is_sound and self.seconds_to_target is not None


@dataclass(frozen=True, slots=True)
class ResultTable:
    rows: tuple[SettingRow, ...]
    metric: str
    """What ``final`` is: loss, or the target's metric."""
    higher_is_better: bool
    """Whether higher is better."""
    is_evaluated: bool
    """Whether ``final`` was measured on held-out data."""
    target: float | None = None
    is_timed: bool = False
    """Whether all settings had the same time, rather than the same steps or epochs."""
    condition: str = ""
    """Its name; empty if the comparison names none."""

    @property
    def baseline(self) -> SettingRow:
        return self.rows[0]


def make_tables(compare: CompareConfig, outcomes: Sequence[ComparisonRunOutcome]) -> tuple[ResultTable, ...]:
    """One for each condition."""
    groups = {
        condition.name: [one for one in outcomes if one.condition == condition.name] for condition in compare.conditions
    }
    return tuple(make_table(compare, group, name) for name, group in groups.items())


def make_table(compare: CompareConfig, outcomes: Sequence[ComparisonRunOutcome], condition: str = "") -> ResultTable:
    """Rows in the order of the settings; ``outcomes`` are those under the condition."""
    target = compare.target
    metric = target.metric if target else "loss"
    sound = [one for one in outcomes if one.is_sound]
    is_evaluated = bool(sound) and all(one.final(metric, is_evaluated=True) is not None for one in sound)

    def final(one: ComparisonRunOutcome) -> float | None:
        return one.final(metric, is_evaluated=is_evaluated)

    groups = [[one for one in outcomes if one.setting == setting.name] for setting in compare.setting]
    return ResultTable(
        rows=tuple(_row(group, groups[0], final, has_target=target is not None) for group in groups if group),
        metric=metric,
        higher_is_better=metric != "loss",
        is_evaluated=is_evaluated,
        target=target.value if target else None,
        is_timed=compare.budget.seconds is not None,
        condition=condition,
    )


def _row(
    group: Sequence[ComparisonRunOutcome], baseline: Sequence[ComparisonRunOutcome], final: Figure, *, has_target: bool
) -> SettingRow:
    sound = [one for one in group if one.is_sound]
    base = [one for one in baseline if one.is_sound]
    reached = [one.seconds_to_target for one in sound if one.seconds_to_target is not None]
    to_target = RunStat.of(reached) if len(reached) == len(sound) else None

    def stat(pick: Figure) -> RunStat | None:
        return RunStat.of(pick(one) for one in sound)

    def ratio(pick: Figure) -> float | None:
        return _ratio(RunStat.of(pick(one) for one in sound), RunStat.of(pick(one) for one in base))

    return SettingRow(
        name=group[0].setting,
        num_workers=group[0].num_workers,
        num_runs=len(group),
        num_sound=len(sound),
        reason=_reason(group),
        num_seeds=len({one.seed for one in group}),
        num_steps=mean(one.num_steps for one in sound) if sound else 0.0,
        steps_per_s=stat(lambda one: one.steps_per_s),
        rate_ratio=ratio(lambda one: one.steps_per_s),
        items_per_s=stat(lambda one: one.items_per_s),
        staleness=stat(lambda one: one.staleness),
        bytes_per_step=stat(lambda one: one.bytes_per_step),
        bytes_ratio=ratio(lambda one: one.bytes_per_step),
        seconds=stat(lambda one: one.seconds),
        seconds_ratio=_paired_stat(sound, base, lambda one: one.seconds, _speedup),
        seconds_to_target=to_target if has_target else None,
        num_reached=len(reached),
        speedup=_paired_stat(sound, base, lambda one: one.seconds_to_target, _speedup) if to_target else None,
        final=stat(final),
        final_gap=_paired_stat(sound, base, final, _difference),
        final_loss=stat(lambda one: one.final_loss),
        eval_loss=stat(lambda one: one.eval_loss),
        memory_bytes=stat(lambda one: one.memory_bytes),
        cost=stat(lambda one: one.cost),
        cost_to_target=stat(lambda one: one.cost_to_target) if to_target else None,
    )


def _ratio(over: RunStat | None, under: RunStat | None) -> float | None:
    return over.mean / under.mean if over is not None and under is not None and under.mean > 0 else None


def _speedup(mine: float, theirs: float) -> float | None:
    return theirs / mine if mine > 0 else None


def _difference(mine: float, theirs: float) -> float:
    return mine - theirs


def _paired_stat(
    sound: Sequence[ComparisonRunOutcome],
    base: Sequence[ComparisonRunOutcome],
    pick: Figure,
    compare: Callable[[float, float], float | None],
) -> RunStat | None:
    """Compares each run with the baseline's run of the same seed; None if one of those has no figure."""
    theirs = {(one.seed, one.repeat): pick(one) for one in base}
    if None in theirs.values():
        return None
    found = []
    for one in sound:
        mine, other = pick(one), theirs.get((one.seed, one.repeat))
        found.append(compare(mine, other) if mine is not None and other is not None else None)
    return RunStat.of(found)


def _reason(group: Sequence[ComparisonRunOutcome]) -> str:
    """``diverged in 2 of 3 runs: its loss is not finite from step 4``; the first run of each kind gives the reason."""
    parts = []
    for state in dict.fromkeys(one.state for one in group if not one.is_sound):
        runs = [one for one in group if one.state == state]
        share = "" if len(runs) == len(group) else f" in {len(runs)} of {len(group)} runs"
        parts.append(f"{state}{share}: {runs[0].reason.rstrip('.')}")
    return "; ".join(parts)
