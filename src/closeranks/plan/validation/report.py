"""How well does the planner predict the runs of a table? Errors by source and kind, beside a constant, and the goals.

Invariant: every row of the table is counted, as predicted or as not usable with its reason; goals are judged on sources
that no constant was fitted on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from closeranks.plan.step_time.constants import Constants, constants_before_look
from closeranks.plan.validation.peak_error import PeakError, PeakSummary, peak_errors, summarize_peaks
from closeranks.plan.validation.prediction_error import (
    ErrorSummary,
    RowError,
    by_source,
    constant_efficiency,
    leave_one_source_out,
    row_errors,
    summarize,
)
from closeranks.plan.validation.rank_order import SweepRank, sweep_ranks
from closeranks.plan.validation.run_plan import Kind, plan_runs
from closeranks.plan.validation.run_table import RunTable, UnusableRun
from closeranks.plan.validation.source_split import is_unseen, source_name

MOST_MEAN, MOST_P90, MOST_OF_A_SOURCE, LEAST_RANK = 0.08, 0.15, 0.15, 0.85
JUDGED: Kind = "dense 16-bit"
KINDS: tuple[Kind, ...] = ("dense 16-bit", "dense fp8", "experts", "other")


@dataclass(frozen=True, slots=True)
class SourceReport:
    """One source's rows of one kind."""

    source: str
    kind: Kind
    is_unseen: bool
    errors: ErrorSummary
    constant: ErrorSummary
    left_out: ErrorSummary
    """After scaling by the median of the other sources."""


@dataclass(frozen=True, slots=True)
class ValidationReport:
    num_rows: int
    rows: tuple[RowError, ...]
    before_look: tuple[RowError, ...]
    """Unseen rows, without the constants that were set after errors of held-out rows had been seen."""
    sources: tuple[SourceReport, ...]
    unusable: tuple[UnusableRun, ...]
    sweeps: tuple[SweepRank, ...]
    """Of unseen sources."""
    peaks: tuple[PeakError, ...]
    peak_summary: PeakSummary

    def judged(self, kind: Kind = JUDGED, *, unseen: bool = True) -> list[RowError]:
        return [row for row in self.rows if row.plan.kind == kind and is_unseen(row.source) == unseen]

    def judged_before_look(self, kind: Kind = JUDGED) -> list[RowError]:
        return [row for row in self.before_look if row.plan.kind == kind]

    @property
    def rank_correlation(self) -> float | None:
        """Mean over the sweeps; None if there is none."""
        return mean(sweep.correlation for sweep in self.sweeps) if self.sweeps else None

    @property
    def meets_goal(self) -> bool:
        found = summarize(self.judged())
        worst = max((one.errors.mean for one in self.sources if one.kind == JUDGED and one.is_unseen), default=1.0)
        rank = self.rank_correlation
        return (
            found.num_rows > 0
            and found.mean <= MOST_MEAN
            and found.p90 <= MOST_P90
            and worst <= MOST_OF_A_SOURCE
            and (rank is None or rank >= LEAST_RANK)
        )


def validate(table: RunTable, constants: Constants | None = None) -> ValidationReport:
    plans, without_plan = plan_runs(table.runs)
    rows, refused = row_errors(plans, constants)
    peaks, num_peaks = peak_errors(table.runs)
    unusable = sorted((*table.unusable, *without_plan, *refused), key=lambda one: one.number)
    dense = [row for row in rows if row.plan.kind == JUDGED and is_unseen(row.source)]
    return ValidationReport(
        len(table.runs) + len(table.unusable),
        tuple(rows),
        tuple(row_errors([plan for plan in plans if is_unseen(plan.source)], constants_before_look())[0]),
        tuple(_source_reports(rows)),
        tuple(unusable),
        tuple(sweep_ranks(dense)),
        tuple(peaks),
        summarize_peaks(peaks, num_peaks, plans),
    )


def _source_reports(rows: Sequence[RowError]) -> list[SourceReport]:
    found = []
    for kind in KINDS:
        own = [row for row in rows if row.plan.kind == kind]
        # The constant knows all rows of its kind; it is the same for every source.
        constant, left_out = by_source(constant_efficiency(own)), leave_one_source_out(own)
        for name, group in sorted(by_source(own).items(), key=lambda entry: (not is_unseen(entry[0]), -len(entry[1]))):
            found.append(
                SourceReport(name, kind, is_unseen(name), summarize(group), summarize(constant[name]), left_out[name])
            )
    return found


def count_unusable(unusable: Sequence[UnusableRun]) -> Mapping[tuple[str, str], int]:
    """By source and reason, the most frequent first."""
    return dict(Counter((source_name(one.source) or "no source", one.reason) for one in unusable).most_common())
