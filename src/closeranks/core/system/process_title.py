"""What ``ps`` and ``top`` show for a process of a run: its role, its rank and the run folder.

Invariant: the environment stays readable in /proc/PID/environ, by which tools find the processes of a job. Without the
``setproctitle`` package only the short name, which ``top`` shows, is set.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from closeranks.core.system.environment import temporarily_set
from closeranks.core.system.linux import set_process_name

_PREFIX = "closeranks: "


def set_title(role: str, run: str = "", *, short: str = "") -> None:
    """``closeranks: rank 3 of 8, runs/demo``; ``short``: at most 15 characters for ``top``."""
    # Without this variable setproctitle overwrites the environment to make room for long titles.
    with suppress(ImportError), temporarily_set("SPT_NOENV", "1"):
        from setproctitle import setproctitle

        setproctitle(_PREFIX + ", ".join(filter(None, (role, run))))
    set_process_name(short or f"cr-{role}")  # after: setproctitle sets it too, to a prefix that all share


def set_child_title(role: str, parent: int) -> None:
    """For a helper process of another one: ``closeranks: writer, rank 3 of 8, runs/demo``."""
    title = ""
    with suppress(OSError):
        title = Path(f"/proc/{parent}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
    set_title(role, title.removeprefix(_PREFIX) if title.startswith(_PREFIX) else "")
