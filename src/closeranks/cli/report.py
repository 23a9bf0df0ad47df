"""``closeranks report``: redraws a run's curves and rewrites its report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from closeranks.cli.terminal import safe_echo

HELP = """Redraw curve.png and rewrite report.md of a run folder, also while the run is active.

\b
  closeranks report runs/tiny
"""


def register(app: typer.Typer) -> None:
    app.command("report", help=HELP, short_help="Redraw a run's curves and rewrite its report.")(report)


def report(run: Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN")]) -> None:
    from closeranks.core.errors import UserError
    from closeranks.telemetry.reports.report import write_report
    from closeranks.telemetry.reports.run_plot import draw_run

    if not (run / "metrics").is_dir():
        raise UserError(f"{run} is not a run folder", "Name the folder that `closeranks train` printed.")
    try:
        draw_run(run)
        safe_echo(write_report(run))
    except OSError as error:
        what = f"the report of {run} cannot be written: {error.strerror or error}"
        raise UserError(what, "Make room there, or make the folder writable.") from error
