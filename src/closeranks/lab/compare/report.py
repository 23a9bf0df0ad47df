"""Reports a comparison: a table on a terminal, a page, JSON and CSV for programs, pictures.

    COMPARISON/compare.md                  the recommendation, the table, the pictures, how to run it again
               compare.json                everything: per setting, per run
               runs.csv                    a line for each run
               curves.png, bars.png        the pictures; with conditions, curves-1.png and so on, and conditions.png

Invariant: the page states the conditions as they were: seeds, network, bytes, machines.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import typer

from closeranks import __version__
from closeranks.lab.compare.comparison_plan import ComparisonPlan, override_texts
from closeranks.lab.compare.config import ComparisonCondition
from closeranks.lab.compare.plots import draw_bars, draw_conditions, draw_curves
from closeranks.lab.compare.result_table import ResultTable, SettingRow
from closeranks.lab.compare.run_outcome import ComparisonRunOutcome
from closeranks.lab.compare.run_records import disk_errors_explained
from closeranks.lab.compare.table_text import headings_and_cells
from closeranks.telemetry.formatting import brief, duration, number, size
from closeranks.telemetry.terminal_table import print_table

_LEFT = ("setting", "note")


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """Everything that a comparison found."""

    plan: ComparisonPlan
    outcomes: tuple[ComparisonRunOutcome, ...]
    tables: tuple[ResultTable, ...]
    """One for each condition."""
    advice: str
    not_counted_reason: str = ""
    """Why bytes were not measured."""
    command: str = ""


def outcome_line(outcome: ComparisonRunOutcome) -> str:
    """The outcome of one run in a line."""
    if not outcome.is_sound:
        return f"{outcome.state} after {duration(outcome.wall_s)}: {outcome.reason}"
    parts = [duration(outcome.wall_s), f"{outcome.num_steps} steps"]
    if outcome.steps_per_s is not None:
        parts.append(f"{brief(outcome.steps_per_s)} steps/s")
    if outcome.bytes_per_step is not None:
        parts.append(f"{size(outcome.bytes_per_step)} a step")
    if outcome.seconds_to_target is not None:
        parts.append(f"target after {duration(outcome.seconds_to_target)}")
    final = outcome.final("loss", is_evaluated=outcome.eval_loss is not None)
    return ", ".join([*parts, *([f"final loss {number(final)}"] if final is not None else [])])


def print_result(result: ComparisonResult) -> None:
    for table in result.tables:
        if table.condition:
            typer.echo(f"\n{table.condition}")
        headings, rows = headings_and_cells(table)
        right = [name for name in headings if name not in _LEFT]
        print_table(headings, rows, right=right, droppable=("memory", "x", "cost", "training", "note"))


def write_report(result: ComparisonResult) -> list[Path]:
    """Write all files; returns their paths, those that people open first."""
    with disk_errors_explained(result.plan.folder):
        return _write_all(result, result.plan.folder)


def _write_all(result: ComparisonResult, folder: Path) -> list[Path]:
    pictures = list(_draw(result, folder))
    _write(folder / "compare.json", json.dumps(as_json(result), indent=1, allow_nan=False) + "\n")
    _write_runs(folder / "runs.csv", result.outcomes)
    _write(folder / "compare.md", markdown_page(result, [path.name for path in pictures]))
    return [folder / "compare.md", *pictures, folder / "compare.json", folder / "runs.csv"]


def _draw(result: ComparisonResult, folder: Path) -> Iterator[Path]:
    compare, tables = result.plan.compare, result.tables
    if len(tables) > 1:
        yield draw_conditions(folder / "conditions.png", compare, tables)
    for position, table in enumerate(tables, 1):
        again = f"-{position}" if len(tables) > 1 else ""
        mine = [one for one in result.outcomes if one.condition == table.condition]
        bars = draw_bars(folder / f"bars{again}.png", compare, table)
        if curves := draw_curves(folder / f"curves{again}.png", compare, table, mine):
            yield curves
        yield bars


def as_json(result: ComparisonResult) -> dict[str, Any]:
    table = result.tables[0]
    document = {
        "closeranks": __version__,
        "command": result.command,
        "job": str(result.plan.job_file),
        "compare": result.plan.compare.model_dump(mode="json"),
        "recommendation": result.advice,
        "baseline": table.baseline.name,
        "metric": table.metric,
        "bytes_not_measured": result.not_counted_reason,
        "settings": [_setting(result, table, row) for table in result.tables for row in table.rows],
    }
    return _finite(document)  # type: ignore[no-any-return]


def _setting(result: ComparisonResult, table: ResultTable, row: SettingRow) -> dict[str, Any]:
    wanted = (row.name, table.condition)
    (case,) = [case for case in result.plan.cases if (case.name, case.condition.name) == wanted]
    mine = [one for one in result.outcomes if (one.setting, one.condition) == wanted]
    runs = [{**_flat(one), "final": one.final(table.metric, is_evaluated=table.is_evaluated)} for one in mine]
    return {"condition": table.condition, **asdict(row), "overrides": list(case.overrides), "runs": runs}


def _flat(outcome: ComparisonRunOutcome) -> dict[str, Any]:
    """All fields but the loss curve, which is in the run folder."""
    return {one.name: getattr(outcome, one.name) for one in fields(outcome) if one.name != "losses"}


def _finite(value: Any) -> Any:
    """Replaces numbers that are not finite, which strict JSON does not have, by null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_runs(path: Path, outcomes: Sequence[ComparisonRunOutcome]) -> None:
    rows = [_flat(one) for one in outcomes]
    figures = [
        {**one.metrics, **{f"eval_{name}": value for name, value in one.eval_metrics.items()}} for one in outcomes
    ]
    with path.open("w", newline="") as file:
        names = [name for name in rows[0] if name not in ("metrics", "eval_metrics")]
        more = sorted({name for each in figures for name in each})
        lines = csv.DictWriter(file, [*names, *more], lineterminator="\n")
        lines.writeheader()
        for row, each in zip(rows, figures, strict=True):
            lines.writerow({**{name: row[name] for name in names}, **each})


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text)
    unfinished.replace(path)


def markdown_page(result: ComparisonResult, pictures: Sequence[str]) -> str:
    shown = [f"![{Path(name).stem}]({name})" for name in pictures]
    return "\n\n".join(
        [
            f"# {Path(result.plan.compare.job).stem}: {len(result.tables[0].rows)} settings compared",
            result.advice.replace("\n", "\n\n"),
            *(part for table in result.tables for part in _table_lines(table)),
            conditions(result),
            *shown,
            "\n".join(["## Settings", "", *_settings(result)]),
            f"Again: `{result.command}`\n",
        ]
    )


def _table_lines(table: ResultTable) -> Iterator[str]:
    if table.condition:
        yield f"## {table.condition}"
    headings, rows = headings_and_cells(table)
    lines = ["| " + " | ".join(headings) + " |", "|" + "".join(_rule(name) for name in headings)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    yield "\n".join(lines)


def _rule(name: str) -> str:
    return "---|" if name in _LEFT else "---:|"


def conditions(result: ComparisonResult) -> str:
    """The conditions under which the figures were measured, in a paragraph."""
    compare, table = result.plan.compare, result.tables[0]
    seeds = ", ".join(map(str, compare.seeds))
    runs = f"Each setting ran with seeds {seeds}" + (f", {compare.repeats} times each" if compare.repeats > 1 else "")
    parts = [f"{runs}, settings in turns. ± is the standard deviation over the runs that finished."]
    others = [f"{table.baseline.name} is the baseline of `x`, `speed-up` and `above baseline`, seed by seed."]
    parts += [_condition(one) for one in compare.conditions if one.faults or one.network]
    if any(one.network for one in compare.conditions):
        parts.append("Bytes are those that crossed the links.")
    elif result.not_counted_reason:
        but = ", except in earlier runs" if any(one.bytes_total is not None for one in result.outcomes) else ""
        parts.append(f"Bytes were not measured{but}: {result.not_counted_reason}.")
    else:
        parts.append("Bytes are those that the workers sent one another over loopback.")
    of = "the last evaluation" if table.is_evaluated else "the last tenth of training"
    parts.append(f"The final {table.metric} is that of {of}; times are of training, evaluations left out.")
    machines = list(dict.fromkeys(one.machine for one in result.outcomes if one.machine))
    if len(machines) > 1:
        parts.append(f"Times of different machines are mixed: {'; '.join(machines)}.")
    return " ".join([*parts, *others])


def _condition(condition: ComparisonCondition) -> str:
    """``one slow worker: slow(rank=0, step=1).``"""
    parts = [f"`{condition.faults.strip()}`"] if condition.faults.strip() else []
    if network := condition.network:
        links = f"links of {network.mbit:g} Mbit/s" if network.mbit else "links as fast as the machine"
        parts.append(
            f"{network.hosts} hosts (network namespaces), {links}, {network.delay_ms:g} ms between two of them"
        )
    return f"{condition.name}: {'; '.join(parts)}." if condition.name else f"{'; '.join(parts)}."


def _settings(result: ComparisonResult) -> list[str]:
    common = override_texts(result.plan.compare.set)
    lines = [f"- all: `{' '.join(common)}`"] if common else []
    for setting in result.plan.compare.setting:
        changes = " ".join(override_texts(setting.set))
        lines.append(f"- {setting.name}: `{changes}`" if changes else f"- {setting.name}: the job as it is")
    return lines
