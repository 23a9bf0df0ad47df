"""Writes the report and the pictures of a run at its end, as far as the disk allows.

The report comes first: drawing takes a second, and a user who waits for the result need not wait for it. Invariant:
whatever the disk does, the user gets one line about it: a report never changes how a run ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from closeranks.core.tracebacks import display_path
from closeranks.telemetry.reports.goodput_plot import draw_goodput
from closeranks.telemetry.reports.html_page import write_html
from closeranks.telemetry.reports.memory_plot import draw_memory
from closeranks.telemetry.reports.phase_plot import draw_phases
from closeranks.telemetry.reports.report import FindingsSection, write_report
from closeranks.telemetry.reports.run_plot import draw_run


def write_pages(
    folder: Path,
    tell: Callable[[str], None],
    *,
    job_file: str = "",
    overrides: Sequence[str] = (),
    failure: str = "",
    is_script: bool = False,
    findings: FindingsSection | None = None,
    in_thread: bool = False,
) -> None:
    """Write ``report.md``, which is announced through ``tell`` at once, then the pictures. See ``write_report``.

    ``in_thread``: they are drawn by a thread, which the interpreter waits for when it exits.
    """
    write = partial(
        write_report,
        folder,
        job_file=job_file,
        overrides=overrides,
        failure=failure,
        is_script=is_script,
        findings=findings,
    )
    try:
        page = write()
    except OSError as error:
        how = f"`closeranks report {display_path(str(folder))}` writes it once the folder can be written."
        tell(f"no report was written ({error.strerror or error}): {how}")
        return
    tell(f"report: {display_path(str(page))}")
    if in_thread:
        threading.Thread(target=_add_plot, args=(folder, write, tell), name="closeranks-picture").start()
    else:
        _add_plot(folder, write, tell)


def draw_pictures(folder: Path) -> bool:
    """Draw all pictures that there is something for; False if no step was recorded, and there is none."""
    if draw_run(folder) is None:
        return False
    for draw in (draw_phases, draw_memory, draw_goodput):
        draw(folder)
    return True


def _add_plot(folder: Path, write: Callable[[], object], tell: Callable[[str], None]) -> None:
    """Draw the plots, write the report once more, now with the plots, and the same as one page of HTML."""
    try:
        if draw_pictures(folder):
            write()
            write_html(folder)
    except OSError as error:
        tell(f"The report has no picture ({error.strerror or error}).")
