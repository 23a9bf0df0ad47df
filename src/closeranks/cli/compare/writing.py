"""How is a comparison told: a table on a terminal, a page, figures for machines, pictures?

    COMPARISON/compare.md                  the recommendation, the table, the pictures, how to do it again
               compare.json                everything: per setting, per run
               runs.csv                    a line for each run
               curves.png, bars.png        what people look at

Invariant: a column stands there only where somebody has a figure for it; a cell without one says why in a word.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from closeranks import __version__
from closeranks.cli.ckpt.places import print_table
from closeranks.cli.compare.picture import draw_bars, draw_curves
from closeranks.cli.compare.plan import Plan, texts_of
from closeranks.cli.compare.reading import Outcome
from closeranks.cli.compare.table import Row, Stat, Table
from closeranks.telemetry.wording import brief, number, size, span

_NONE = "-"
_LEFT = ("setting", "note")


@dataclass(frozen=True, slots=True)
class Story:
    """All that a comparison came to."""

    plan: Plan
    outcomes: tuple[Outcome, ...]
    table: Table
    advice: str
    uncounted: str = ""
    """Why bytes were not measured."""
    command: str = ""


def headings_and_cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """The table as text; columns that say nothing are left out."""
    goal = f"to {table.metric} {brief(table.target)}" if table.target is not None else "to the target"
    final = f"final {table.metric}"
    named = [_cells(table, row, goal, final) for row in table.rows]
    shown = [name for name in named[0] if any(cells[name] not in ("", _NONE) for cells in named)]
    if table.target is not None and goal not in shown:
        shown.insert(1, goal)
    return shown, [[cells[name] for name in shown] for cells in named]


def _cells(table: Table, row: Row, goal: str, final: str) -> dict[str, str]:
    base = row is table.baseline
    return {
        "setting": row.name,
        "workers": str(row.num_workers) if any(one.num_workers != row.num_workers for one in table.rows) else "",
        "steps/s": _about(row.steps_per_s, brief),
        "x": _times(row.rate_ratio, base),
        "bytes/step": size(row.bytes_per_step.mean) if row.bytes_per_step else _NONE,
        "training": _about(row.seconds, span) if not table.is_timed else "",
        goal: _goal(table, row),
        "speed-up": _NONE if base else _about(row.speedup, _ratio),
        final: _about(row.final, number),
        "above baseline": _NONE if base or row.final_gap is None else _about(row.final_gap, _signed),
        "memory": size(row.memory_bytes.mean) if row.memory_bytes else _NONE,
        "cost": brief(row.cost.mean) if row.cost else _NONE,
        "cost to target": brief(row.cost_to_target.mean) if row.cost_to_target else _NONE,
        "note": row.reason,
    }


def _goal(table: Table, row: Row) -> str:
    if table.target is None or not row.num_sound:
        return _NONE
    if row.seconds_to_target is not None:
        return _about(row.seconds_to_target, span)
    return "not reached" if not row.num_reached else f"reached by {row.num_reached} of {row.num_sound}"


def _about(stat: Stat | None, words: Any) -> str:
    if stat is None:
        return _NONE
    return f"{words(stat.mean)} ± {words(stat.spread).lstrip('+')}" if stat.num > 1 else str(words(stat.mean))


def _signed(value: float) -> str:
    return f"{value:+.4f}" if abs(value) >= 0.0001 or value == 0 else f"{value:+.1e}"


def _ratio(value: float) -> str:
    return f"{value:.2f}x"


def _times(value: float | None, is_baseline: bool) -> str:
    return _NONE if value is None or is_baseline else f"{value:.2f}x"


def in_words(outcome: Outcome) -> str:
    """One run, in a line."""
    if not outcome.is_sound:
        return f"{outcome.state} after {span(outcome.wall_s)}: {outcome.reason}"
    parts = [span(outcome.wall_s), f"{outcome.num_steps} steps"]
    if outcome.steps_per_s is not None:
        parts.append(f"{brief(outcome.steps_per_s)} steps/s")
    if outcome.bytes_per_step is not None:
        parts.append(f"{size(outcome.bytes_per_step)} a step")
    if outcome.seconds_to_target is not None:
        parts.append(f"target after {span(outcome.seconds_to_target)}")
    final = outcome.final("loss")
    return ", ".join([*parts, *([f"final loss {number(final)}"] if final is not None else [])])


def show(story: Story) -> None:
    headings, rows = headings_and_cells(story.table)
    right = [name for name in headings if name not in _LEFT]
    print_table(headings, rows, right=right, spare=("memory", "x", "cost", "training", "note"))


def write_down(story: Story) -> list[Path]:
    """All files; what they are called, those first that people open."""
    folder = story.plan.folder
    compare, table = story.plan.compare, story.table
    bars = draw_bars(folder / "bars.png", compare, table)
    curves = draw_curves(folder / "curves.png", compare, table, story.outcomes)
    pictures = [path for path in (curves, bars) if path is not None]
    _write(folder / "compare.json", json.dumps(as_json(story), indent=1, allow_nan=False) + "\n")
    _write_runs(folder / "runs.csv", story.outcomes)
    _write(folder / "compare.md", page(story, [path.name for path in pictures]))
    return [folder / "compare.md", *pictures, folder / "compare.json", folder / "runs.csv"]


def as_json(story: Story) -> dict[str, Any]:
    table = story.table
    told = {
        "closeranks": __version__,
        "command": story.command,
        "job": str(story.plan.job_file),
        "compare": story.plan.compare.model_dump(mode="json"),
        "recommendation": story.advice,
        "baseline": table.baseline.name,
        "metric": table.metric,
        "bytes_not_measured": story.uncounted,
        "settings": [_setting(story, row) for row in table.rows],
    }
    return _finite(told)  # type: ignore[no-any-return]


def _setting(story: Story, row: Row) -> dict[str, Any]:
    (case,) = [case for case in story.plan.cases if case.name == row.name]
    metric = story.table.metric
    runs = [{**_flat(one), "final": one.final(metric)} for one in story.outcomes if one.setting == row.name]
    return {**asdict(row), "overrides": list(case.overrides), "runs": runs}


def _flat(outcome: Outcome) -> dict[str, Any]:
    """All but the curve, which the run folder holds."""
    return {one.name: getattr(outcome, one.name) for one in fields(outcome) if one.name != "losses"}


def _finite(value: Any) -> Any:
    """Strict JSON has no number for what is not finite: null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_runs(path: Path, outcomes: Sequence[Outcome]) -> None:
    rows = [_flat(one) for one in outcomes]
    metrics = sorted({name for one in outcomes for name in one.metrics})
    with path.open("w", newline="") as file:
        names = [name for name in rows[0] if name != "metrics"]
        lines = csv.DictWriter(file, [*names, *metrics], lineterminator="\n")
        lines.writeheader()
        for row in rows:
            lines.writerow({**{name: row[name] for name in names}, **row["metrics"]})


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text)
    unfinished.replace(path)


def page(story: Story, pictures: Sequence[str]) -> str:
    headings, rows = headings_and_cells(story.table)
    lines = ["| " + " | ".join(headings) + " |", "|" + "".join(_rule(name) for name in headings)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    shown = [f"![{Path(name).stem}]({name})" for name in pictures]
    return "\n\n".join(
        [
            f"# {Path(story.plan.compare.job).stem}: {len(story.table.rows)} settings compared",
            story.advice,
            "\n".join(lines),
            conditions(story),
            *shown,
            "\n".join(["## Settings", "", *_settings(story)]),
            f"Again: `{story.command}`\n",
        ]
    )


def _rule(name: str) -> str:
    return "---|" if name in _LEFT else "---:|"


def conditions(story: Story) -> str:
    """Under which conditions these figures hold, in a paragraph."""
    compare, table = story.plan.compare, story.table
    seeds = ", ".join(map(str, compare.seeds))
    runs = f"Each setting ran with seeds {seeds}" + (f", {compare.repeats} times each" if compare.repeats > 1 else "")
    parts = [f"{runs}, settings in turns. ± is the standard deviation over the runs that finished."]
    others = [f"{table.baseline.name} is what `x`, `speed-up` and `above baseline` are against, seed by seed."]
    network = compare.network
    if network is not None:
        width = f"links of {network.mbit:g} Mbit/s" if network.mbit else "links as fast as the machine"
        parts.append(
            f"{network.hosts} hosts (network namespaces), {width}, {network.delay_ms:g} ms between two of them."
        )
        parts.append("Bytes are those that crossed the links.")
    elif story.uncounted:
        parts.append(f"Bytes were not measured: {story.uncounted}.")
    else:
        parts.append("Bytes are those that the workers sent one another over loopback.")
    of = "the last evaluation" if table.is_evaluated else "the last tenth of training"
    parts.append(f"The final {table.metric} is that of {of}; times are of training, evaluations left out.")
    return " ".join([*parts, *others])


def _settings(story: Story) -> list[str]:
    common = texts_of(story.plan.compare.set)
    lines = [f"- all: `{' '.join(common)}`"] if common else []
    for setting in story.plan.compare.setting:
        changes = " ".join(texts_of(setting.set))
        lines.append(f"- {setting.name}: `{changes}`" if changes else f"- {setting.name}: the job as it is")
    return lines
