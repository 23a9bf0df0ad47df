"""Resolves the relative paths of a job: in the working folder first, then beside the job file.

Invariant: a path that exists in the working folder is never taken from elsewhere; URLs, absolute paths and words such
as ``stdlib`` stay as they are. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from closeranks.core.config.table import ConfigTable
from closeranks.core.errors import DataError, Problem
from closeranks.facts.prices import load_prices
from closeranks.run.job.job import Job

_KEYS = ("path", "eval_path", "weights", "prices")
T = TypeVar("T", bound=ConfigTable)


def resolve_paths(job: Job, job_file: Path) -> Job:
    """The job with resolved paths of data, weights and prices: those only beside its file become absolute."""
    folder = job_file.parent
    tables = {"checkpoint": job.checkpoint, "data": job.data, "telemetry": job.telemetry}
    return job.model_copy(update={name: _located(table, folder) for name, table in tables.items()})


def resolve_existing_paths(job: Job, job_file: Path) -> Job:
    """The same, and raises if a path is missing: it may be missing on one host only."""
    job = resolve_paths(job, job_file)
    for problem in missing_paths(job, job_file):
        raise DataError(f"{problem.place}: {problem.what}", problem.fix)
    load_prices(job.telemetry.prices)  # refused now, and not when the first step has a cost
    return job


def missing_paths(job: Job, job_file: Path) -> list[Problem]:
    """Relative paths that are in neither place, each with its key and where it was looked for."""
    places = f"the working folder {Path.cwd()}"
    if job_file.parent.resolve() != Path.cwd():
        places += f", nor beside the job file in {job_file.parent.resolve()}"
    lost = [
        (key, value)
        for table, prefix in ((job.data, "data"), (job.checkpoint, "checkpoint"), (job.telemetry, "telemetry"))
        for key, value in _named(table, prefix)
        if _is_relative(value) and not _is_there(Path(value))
    ]
    return [Problem(key, f"there is no '{value}' in {places}", "Check the path.") for key, value in lost]


def _located(table: T, folder: Path) -> T:
    changed: dict[str, Any] = {}
    for key in type(table).model_fields:
        value = getattr(table, key)
        if key in _KEYS and isinstance(value, str) and _is_relative(value):
            is_beside = not _is_there(Path(value)) and _is_there(folder / value)
            changed[key] = str((folder / value).absolute()) if is_beside else value
        elif isinstance(value, ConfigTable):
            changed[key] = _located(value, folder)
        elif key == "parts" and isinstance(value, dict):
            changed[key] = {name: _located(part, folder) for name, part in value.items()}
    return table.model_copy(update=changed)


def _named(table: ConfigTable, prefix: str) -> Iterator[tuple[str, str]]:
    for key in type(table).model_fields:
        value = getattr(table, key)
        if key in _KEYS and isinstance(value, str):
            yield f"{prefix}.{key}", value
        elif isinstance(value, ConfigTable):
            yield from _named(value, f"{prefix}.{key}")
        elif key == "parts" and isinstance(value, dict):
            for name, part in value.items():
                yield from _named(part, f"{prefix}.{key}.{name}")


def _is_relative(value: str) -> bool:
    is_word = value in ("", "stdlib") or "://" in value
    return not is_word and not Path(value).expanduser().is_absolute()


def _is_there(path: Path) -> bool:
    """Some formats are named by the common prefix of their files, or by a pattern."""
    return path.exists() or "*" in path.name or any(path.parent.glob(f"{path.name}.*"))
