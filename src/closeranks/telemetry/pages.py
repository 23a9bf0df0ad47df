"""Write the page and the picture of a run at its end, as far as the disk lets us.

Invariant: whatever the disk does, this returns one line for the person: how a run ended is not changed by its report.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from closeranks.core.blame import shown
from closeranks.telemetry.picture import draw
from closeranks.telemetry.report import write_report


def write_pages(
    folder: Path, *, job_file: str = "", overrides: Sequence[str] = (), failure: str = "", is_script: bool = False
) -> str:
    """``curve.png`` and ``report.md``; where they are, or why they are not. See ``write_report``."""
    without = ""
    try:
        draw(folder)
    except OSError as error:
        without = f", without its picture ({error.strerror or error})"
    try:
        page = write_report(folder, job_file=job_file, overrides=overrides, failure=failure, is_script=is_script)
    except OSError as error:
        how = f"`closeranks report {shown(str(folder))}` writes it once the folder can be written."
        return f"no report was written ({error.strerror or error}): {how}"
    return f"report: {shown(str(page))}{without}"
