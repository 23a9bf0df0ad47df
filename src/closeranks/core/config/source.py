"""How is a job file found and read?

Invariant: every way a path can be wrong (missing, a folder, unreadable, not UTF-8) is a ``Problem`` with its fix;
nothing of the operating system's exceptions gets through.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from closeranks.core.config.syntax import JobText, read_toml
from closeranks.core.errors import Problem


def read_job(path: Path) -> JobText:
    """The job file at a path, or the problems that keep it from being read."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return _unread(path, f"no job file at {path}", _nearby(path))
    except IsADirectoryError:
        return _unread(path, f"{path} is a folder, not a job file", _inside(path))
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        return _unread(path, f"the job file {path} cannot be read: {reason}", "Check the path and its permissions.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"the job file is not UTF-8 text (byte {error.start}, line {line})"
        return _unread(path, what, "Save it again with the encoding UTF-8.")
    return read_toml(text.replace("\r\n", "\n"), path.name)


def _unread(path: Path, what: str, fix: str) -> JobText:
    return JobText(path.name, problems=(Problem(path.name or str(path), what, fix),), is_whole=False)


def _toml_files(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.suffix == ".toml")
    except OSError:
        return []


def _nearby(path: Path) -> str:
    """A file of the same folder that was probably meant."""
    if not path.parent.is_dir():
        return f"There is no folder {path.parent} either."
    files = _toml_files(path.parent)
    near = get_close_matches(path.name, files, n=1, cutoff=0.5) or (files if len(files) == 1 else [])
    if near:
        return f"Did you mean '{path.parent / near[0]}'?"
    return f"The job files there are: {', '.join(files)}." if files else "There are no *.toml files in that folder."


def _inside(folder: Path) -> str:
    files = _toml_files(folder)
    if not files:
        return "Give the path of a *.toml file."
    return f"Did you mean {' or '.join(repr(str(folder / name)) for name in files[:3])}?"
