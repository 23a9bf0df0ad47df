"""Where does a run write, and what stands there from the start?

Invariants: an earlier run is never overwritten (a numbered folder is taken instead, unless the run continues it); a
folder that cannot be written is refused before anything is started. Imports no torch.
"""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path

from closeranks.core.config.toml import dump_toml
from closeranks.core.errors import SetupError
from closeranks.run.job import Job


def choose_folder(job: Job, stem: str) -> Path:
    """The job's folder, or the next free numbered one beside it; a resumed run stays where it was."""
    wanted = Path(job.run.folder or Path("runs") / (job.run.name or stem)).expanduser()
    if job.checkpoint.resume and _same_run(wanted, Path(job.checkpoint.resume)):
        return wanted
    return free_folder(wanted)


def free_folder(wanted: Path) -> Path:
    """``wanted`` itself while no run stands in it, else the first free of ``wanted-2``, ``wanted-3``, ..."""
    if not (wanted / "metrics").exists() and not (wanted / "logs").exists():
        return wanted
    return next(path for n in count(2) if not (path := wanted.with_name(f"{wanted.name}-{n}")).exists())


def prepare_folder(job: Job, folder: Path) -> None:
    """Make the folder and write the resolved job into it."""
    try:
        (folder / "metrics").mkdir(parents=True, exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
        (folder / "job.toml").write_text(dump_toml(job))
        (folder / "config.json").write_text(json.dumps(job.model_dump(mode="json"), indent=2) + "\n")
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        fix = "Set run.folder to a place you can write to that has room."
        raise SetupError(f"the run folder {folder} cannot be written: {reason}", fix) from error


def _same_run(wanted: Path, resume: Path) -> bool:
    return wanted.resolve() in (resume.resolve(), resume.resolve().parent)
