"""``closeranks report``: redraws a run's curves and rewrites its report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from closeranks.cli.terminal import safe_echo

HELP = """Redraw the plots of a run folder and rewrite its report, also while the run is active.

Writes report.md, curve.png (loss and speed), phases.png (where the time of a step went), memory.png (by kind and rank),
goodput.png (where the time of the workers went, and what it cost) and report.html, which holds all of them.

\b
  closeranks report runs/tiny
"""


def register(app: typer.Typer) -> None:
    app.command("report", help=HELP, short_help="Redraw a run's plots and rewrite its report.")(report)


def report(run: Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN")]) -> None:
    from closeranks.core.errors import UserError
    from closeranks.run.diagnosis import findings_section
    from closeranks.telemetry.reports.html_page import write_html
    from closeranks.telemetry.reports.pages import draw_pictures
    from closeranks.telemetry.reports.report import write_report

    if not (run / "metrics").is_dir():
        raise UserError(f"{run} is not a run folder", "Name the folder that `closeranks train` printed.")
    try:
        draw_pictures(run)
        safe_echo(write_report(run, findings=findings_section))
        safe_echo(write_html(run))
    except OSError as error:
        what = f"the report of {run} cannot be written: {error.strerror or error}"
        raise UserError(what, "Make room there, or make the folder writable.") from error
