"""``closeranks plan validate``: predicts published runs, and says how far the predictions are from what was measured.

Imports no torch. Invariant: the last line is one JSON object, whatever the rows; a row that cannot be used is counted
with its reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Predict published runs, and compare with what was measured: the error of step time and memory by source.

\b
  closeranks plan validate --runs benchmarks/plan_runs.csv
  closeranks plan validate --runs mine.csv --rows              every row with its error
  closeranks plan validate --runs mine.csv --source my/repo    rows of one source alone

The file is a CSV table with one run per row; docs/plan-validate.md lists the columns, and what is assumed where a cell
is blank. Sources on whose rows the constants were fitted are marked "fit"; every other source is unseen, and the goals
are judged on those. The last line is the result as JSON.
"""


def register(app: typer.Typer) -> None:
    app.command("validate", help=HELP, short_help="Predict published runs; errors by source.")(validate_runs)


def validate_runs(
    runs: Annotated[Path, typer.Option(help="Table of measured runs.", metavar="FILE.csv")],
    source: Annotated[str, typer.Option(help="Only sources whose name contains this.")] = "",
    rows: Annotated[bool, typer.Option("--rows", help="Also list every row.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Only the result as JSON, for programs.")] = False,
) -> None:
    import json

    from closeranks.plan.validation import validation_text as text
    from closeranks.plan.validation.report import validate
    from closeranks.plan.validation.run_table import RunTable, load_runs
    from closeranks.telemetry.terminal_table import print_table, stdout

    table = load_runs(runs)
    if source:
        table = RunTable(
            tuple(run for run in table.runs if source in run.source),
            tuple(run for run in table.unusable if source in run.source),
            table.unread,
        )
    report = validate(table)
    if not as_json:
        console = stdout()
        tables = [text.source_rows(report), text.kind_rows(report), text.sweep_rows(report), text.unusable_rows(report)]
        for found in [*([text.every_row(report)] if rows else []), *tables]:
            if len(found) > 1:
                print_table(found[0], found[1:], right=[name for name in found[0] if name in text.NUMBERS])
                console.print()
        if table.unread:
            console.print(f"Columns that are not read: {', '.join(table.unread)}.", soft_wrap=True)
        console.print(*text.sentences(report), text.LEGEND, text.SWEEP_LEGEND, sep="\n", soft_wrap=True)
    print(json.dumps(text.validation_json(report)))
