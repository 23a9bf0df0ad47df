"""Formats a validation as table rows, sentences and one line of JSON.

Pure: a report in, text out. Invariant: the JSON has the fields ``name``, ``figures``, ``goal`` and ``met``, as every
benchmark's last line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from closeranks.plan.validation.peak_error import PeakSummary
from closeranks.plan.validation.prediction_error import ErrorSummary, constant_efficiency, summarize
from closeranks.plan.validation.report import (
    JUDGED,
    KINDS,
    LEAST_RANK,
    MOST_MEAN,
    MOST_OF_A_SOURCE,
    MOST_P90,
    ValidationReport,
    count_unusable,
)

_VERDICTS = ("fits", "borderline", "does not fit")
Rows = list[tuple[str, ...]]
"""The first is the heading."""
GOAL = (
    f"step time of unseen sources, {JUDGED}: mean {MOST_MEAN:.0%}, 90th percentile {MOST_P90:.0%}, no source above "
    f"{MOST_OF_A_SOURCE:.0%}; rank correlation in sweeps {LEAST_RANK}"
)
NUMBERS = frozenset(
    {"rows", "sources", "mean", "p90", "bias", "one constant", "left out", "measured s", "predicted s", "error", "GPUs"}
    | {"choices", "slowest", "Spearman", "pick"}
)
_HEAD = ("source", "kind", "side", "rows", "mean", "p90", "bias", "one constant", "left out")
LEGEND = (
    "mean, p90: absolute error of step time; bias: its mean with sign, below zero where predictions are too fast; one "
    "constant: the mean error if every GPU kind had one efficiency, the best one for these very rows; left out: the "
    "mean error after dividing a source's predictions by the median ratio of predicted to measured time of the other "
    "sources of its kind (constants are not fitted again)."
)
SWEEP_LEGEND = (
    "A sweep: choices for one model on the same GPUs, from one source, ranked by time per token. slowest, pick: by how "
    "much the slowest choice, and the one that was predicted to be fastest, took longer than the fastest."
)


def source_rows(report: ValidationReport) -> Rows:
    rows: Rows = [_HEAD]
    for one in report.sources:
        side = "unseen" if one.is_unseen else "fit"
        rows.append((one.source, one.kind, side, *_figures(one.errors), _percent(one.constant), _percent(one.left_out)))
    return rows


def kind_rows(report: ValidationReport) -> Rows:
    """Weighed by source."""
    rows: Rows = [("weighed by source", "side", "sources", "rows", "mean", "p90", "bias", "one constant")]
    for kind in KINDS:
        for unseen in (True, False):
            own = report.judged(kind, unseen=unseen)
            if own:
                found, constant = summarize(own), summarize(constant_efficiency(own))
                side = "unseen" if unseen else "fit"
                rows.append((kind, side, str(found.num_sources), *_figures(found), _percent(constant)))
    return rows


def sweep_rows(report: ValidationReport) -> Rows:
    """Of unseen sources."""
    return [
        ("sweep", "model", "GPUs", "choices", "slowest", "Spearman", "pick"),
        *(
            (
                one.source,
                one.model,
                str(one.num_devices),
                str(one.num_choices),
                f"{one.spread - 1:+.0%}",
                f"{one.correlation:.2f}",
                f"{one.pick:+.0%}",
            )
            for one in report.sweeps
        ),
    ]


def _figures(found: ErrorSummary) -> tuple[str, str, str, str]:
    return str(found.num_rows), _percent(found), f"{found.p90:.1%}", f"{found.bias:+.1%}"


def _percent(found: ErrorSummary) -> str:
    return f"{found.mean:.1%}"


def every_row(report: ValidationReport) -> Rows:
    rows: Rows = [("line", "source", "model", "GPUs", "of", "layout", "measured s", "predicted s", "error")]
    for row in report.rows:
        run, choice = row.plan.run, row.plan.choice
        how = f"{choice.layout} micro {choice.micro_batch} {choice.recompute} {choice.precision}"
        times = (f"{row.plan.measured_s:.4g}", f"{row.predicted_s:.4g}", f"{row.signed:+.1%}")
        rows.append((str(run.number), row.source, run.model, str(run.gpu_count), run.gpu, how, *times))
    return rows


def unusable_rows(report: ValidationReport) -> Rows:
    counts = count_unusable(report.unusable)
    return [
        ("not predicted", "rows", "because"),
        *((source, str(count), reason) for (source, reason), count in counts.items()),
    ]


def sentences(report: ValidationReport) -> Iterator[str]:
    yield f"{len(report.rows)} of {report.num_rows} rows predicted, {len(report.unusable)} not."
    rank = report.rank_correlation
    if rank is None:
        yield "No sweep of unseen sources is long enough to compare rank order."
    else:
        num_choices = sum(sweep.num_choices for sweep in report.sweeps)
        sweeps = f"{len(report.sweeps)} sweeps of unseen sources ({num_choices} choices)"
        yield f"Rank order inside {sweeps}: {rank:.2f} (Spearman, mean over the sweeps)."
    if before := report.judged_before_look():
        found = summarize(before)
        told = f"mean {found.mean:.1%}, 90th percentile {found.p90:.1%}, bias {found.bias:+.1%}"
        yield f"Unseen {JUDGED}, without the constants that were set after unseen errors had been seen: {told}."
    yield from _memory_sentences(report.peak_summary)


def _memory_sentences(peaks: PeakSummary) -> Iterator[str]:
    count = f"Memory: {peaks.num_published} rows publish a peak, {peaks.num_predicted or 'none'} can be predicted"
    errors = f": mean error {peaks.mean:.1%}, bias {peaks.bias:+.1%}, {peaks.within_10:.0%} within 10%"
    yield f"{count}{errors if peaks.num_predicted else ''}."
    if num_ran := sum(peaks.verdicts.values()):
        told = ", ".join(f"{peaks.verdicts.get(verdict, 0)} '{verdict}'" for verdict in _VERDICTS)
        yield f"Of {num_ran} runs that state their recompute and ran, the planner says of {told}."


def validation_json(report: ValidationReport) -> dict[str, Any]:
    figures: dict[str, Any] = {"rows": report.num_rows, "predicted": len(report.rows), "not": len(report.unusable)}
    for kind in KINDS:
        for unseen in (True, False):
            own = report.judged(kind, unseen=unseen)
            if own:
                found, constant = summarize(own), summarize(constant_efficiency(own))
                key = f"{kind}, {'unseen' if unseen else 'fit'}"
                figures[key] = {**_json(found), "constant_mean": round(constant.mean, 4)}
        if before := report.judged_before_look(kind):
            figures[f"{kind}, unseen, without constants set after a look"] = _json(summarize(before))
    figures["rank_correlation"] = None if report.rank_correlation is None else round(report.rank_correlation, 3)
    figures["sweeps"] = [
        {
            "source": one.source,
            "model": one.model,
            "devices": one.num_devices,
            "choices": one.num_choices,
            "spearman": round(one.correlation, 3),
            "slowest_over_fastest": round(one.spread, 3),
            "pick_over_fastest": round(1 + one.pick, 3),
        }
        for one in report.sweeps
    ]
    peaks = report.peak_summary
    figures["memory"] = {
        "published": peaks.num_published,
        "predicted": peaks.num_predicted,
        "mean": round(peaks.mean, 4),
        "bias": round(peaks.bias, 4),
        "within_10_percent": round(peaks.within_10, 3),
        "verdicts_of_runs_that_ran": {verdict: peaks.verdicts.get(verdict, 0) for verdict in _VERDICTS},
    }
    figures["sources"] = {f"{one.source}, {one.kind}": _json(one.errors) for one in report.sources}
    return {"name": "plan_validate", "figures": figures, "goal": GOAL, "met": report.meets_goal}


def _json(found: ErrorSummary) -> dict[str, Any]:
    return {
        "rows": found.num_rows,
        "mean": round(found.mean, 4),
        "p90": round(found.p90, 4),
        "bias": round(found.bias, 4),
    }
