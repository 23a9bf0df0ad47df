"""Chooses the folder that a run writes to, and creates it with its first files.

Invariants: an earlier run is never overwritten (a numbered folder is taken instead, unless the run continues it); a
folder that cannot be written is refused before anything is started. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

from closeranks.core.config.toml.writer import dump_toml
from closeranks.core.errors import SetupError
from closeranks.run.job.job import Job
from closeranks.storage.names import OWNER


def choose_folder(job: Job, stem: str, own: Path | None = None) -> Path:
    """The job's folder, or the next free numbered one beside it; a resumed run stays where it was. ``own``: a folder
    that the launcher has made for this run, in case the job names no other."""
    wanted = _wanted(job, stem)
    _refuse_if_shared(wanted)
    resumed = _resumed(job, wanted)
    if resumed is None:
        return free_folder(wanted, own)
    if not holds_run(resumed) and (foreign := _would_replace(resumed)):
        what = f"{resumed} holds no run, but {foreign}, which the run would overwrite"
        raise SetupError(what, "Set run.folder to a folder of its own.")
    return resumed


def continues_run(job: Job, stem: str) -> bool:
    """Whether the run continues in the folder of an earlier one, or would if there were one."""
    return _resumed(job, _wanted(job, stem)) is not None


def _wanted(job: Job, stem: str) -> Path:
    return Path(job.run.folder or Path("runs") / (job.run.name or stem)).expanduser()


def _resumed(job: Job, wanted: Path) -> Path | None:
    if job.checkpoint.resume == "auto":
        return wanted
    return _continued(wanted, Path(job.checkpoint.resume)) if job.checkpoint.resume else None


def _refuse_if_shared(folder: Path) -> None:
    """A run writes a dozen files: refuse the root, the home folder, and the working folder or one around it."""
    place, here = folder.resolve(), Path.cwd()
    home = Path("~").expanduser().resolve()
    if place == Path(place.anchor):
        what = "the root folder"
    elif place == home:
        what = "your home folder"
    elif (place == here or place in here.parents) and not holds_run(folder):
        what = "the working folder" if place == here else "a parent of the working folder"
    else:
        return
    fix = "Set run.folder to a folder of its own, such as runs/first; it is created if it does not exist."
    raise SetupError(f"run.folder = {folder} is {what}, and a run needs a folder of its own", fix)


def free_folder(wanted: Path, own: Path | None = None) -> Path:
    """``wanted`` itself while it holds nothing that a run writes, else the first free of ``wanted-2`` and so on."""
    is_taken = holds_run(wanted) or _would_replace(wanted) or _is_owned(wanted)
    return _numbered(wanted, own) if is_taken and not _is_same(wanted, own) else wanted


def _is_same(folder: Path, own: Path | None) -> bool:
    return own is not None and folder.absolute() == own.absolute()


def holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("metrics", "logs", "job.toml", "checkpoints"))


def _would_replace(folder: Path) -> str:
    """The name of a file in it that a run would overwrite; empty if there is none."""
    names = (
        "config.json",
        "status.json",
        "report.md",
        "report.html",
        "curve.png",
        "phases.png",
        "memory.png",
        "goodput.png",
    )
    return next((name for name in names if (folder / name).exists()), "")


def _is_owned(folder: Path) -> bool:
    """Whether a run that has written nothing yet may be starting there."""
    try:
        return (folder / OWNER).stat().st_size > 0
    except OSError:
        return False


def make_unused_folder(wanted: Path) -> Path:
    """``wanted`` itself if nothing is there, else the next free one beside it. The folder is created, so that no other
    process gets it."""
    wanted = wanted.expanduser()
    while True:
        folder = _numbered(wanted) if wanted.exists() else wanted
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise unwritable_error(folder, error) from error
        return folder


def _numbered(wanted: Path, own: Path | None = None) -> Path:
    candidates = (wanted.with_name(f"{wanted.name}-{n}") for n in count(2))
    return next(path for path in candidates if not path.exists() or _is_same(path, own))


def make_free_folder(wanted: Path) -> Path:
    """Create a free folder with its logs folder; runs that start at the same moment each get a folder of their own."""
    while True:
        folder = free_folder(wanted)
        try:
            (folder / "logs").mkdir(parents=True)
        except FileExistsError:
            if not holds_run(folder):
                raise
        else:
            return folder


def prepare_folder(job: Job, folder: Path) -> None:
    """Create the folder. Files of an earlier part of the run are kept until the run has actually started."""
    _write(job, folder, over=False)


def record_job(job: Job, folder: Path, *, must: bool = True) -> str:
    """Write the job into the folder, once the run has started or resumed. With ``must`` an error is raised, otherwise
    its text is returned."""
    try:
        _write(job, folder, over=True)
    except SetupError as error:
        if must:
            raise
        return error.what
    return ""


def remove_refused_folder(folder: Path) -> None:
    """Remove a folder that was made for a run that was refused; it stays if it holds anything that is not ours."""
    for name in ("logs", "metrics"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("job.toml", "config.json", "status.json", OWNER, f"checkpoints/{OWNER}"):
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)
    for place in (folder / "checkpoints", folder):
        with suppress(OSError):
            place.rmdir()


def unwritable_error(folder: Path, error: OSError) -> SetupError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    fix = "Set run.folder to a writable folder with free space."
    return SetupError(f"the run folder {folder} cannot be written: {reason}", fix)


def _write(job: Job, folder: Path, *, over: bool) -> None:
    try:
        (folder / "metrics").mkdir(parents=True, exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
        if over or not (folder / "job.toml").exists():
            _replace(folder / "job.toml", dump_toml(job))
            _replace(folder / "config.json", json.dumps(job.model_dump(mode="json"), indent=2) + "\n")
    except OSError as error:
        raise unwritable_error(folder, error) from error


def _replace(path: Path, text: str) -> None:
    """Atomic: on a full disk the old file stays."""
    temporary = path.with_name(f".{path.name}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _continued(wanted: Path, resumed: Path) -> Path | None:
    """The folder of the run that is resumed, if it is one of this job's: ``wanted`` or a numbered one beside it."""
    for folder in (resumed, *list(resumed.parents)[:2]):  # the run, its checkpoints folder, or one of them
        place = folder.resolve()
        number = place.name.removeprefix(wanted.resolve().name)
        if place.parent == wanted.resolve().parent and re.fullmatch(r"(-\d+)?", number):
            return wanted if not number else wanted.with_name(place.name)
    return None
