"""``closeranks ckpt ls``: lists the checkpoints of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from closeranks.checkpoint.load.catalogue import FoundCheckpoint

HELP = """List the checkpoints of a run, newest first; a star marks the one that a resumed run takes first.

\b
  closeranks ckpt ls runs/tiny
  closeranks ckpt ls s3://bucket/runs/tiny
  closeranks ckpt ls runs/tiny --json

Reads manifests only: `closeranks ckpt verify` reads the bytes. "own" is what the checkpoint itself occupies; "refs"
means that the rest is in earlier ones. States:

\b
  certified    read back from the medium and sealed
  damaged      its manifest is torn or changed
  unfinished   it has no manifest: the save was interrupted, or is still running
  suspect      sealed, but not the one that `latest` was written for; tried last
  serving      removed, but others need its files

A name such as step-00000120-2 was saved after the run was opened for the second time (resumed, or restarted in its
folder); a higher number is always newer.
"""


def register(app: typer.Typer) -> None:
    app.command("ls", help=HELP, short_help="List checkpoints with their size, layout and state.")(ls)


def ls(
    place: Annotated[
        str, typer.Argument(help="A run, its checkpoints, one of them, or a URL of those.", metavar="RUN")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")] = False,
) -> None:
    import json

    from closeranks.run.state.checkpoint_lookup import require_checkpoints
    from closeranks.telemetry.terminal_table import print_table, stdout

    catalogue = require_checkpoints(place)
    first = next((found for found in catalogue.candidates() if found.manifest is not None), None)
    if as_json:
        rows = [_row(found, is_next=found is first) for found in catalogue]
        problems = [{"what": problem.what, "is_damage": problem.is_damage} for problem in catalogue.problems]
        print(json.dumps({"place": catalogue.place, "checkpoints": rows, "problems": problems}, indent=1))
        return
    headings = ("", "name", "step", "when", "size", "own", "bytes", "layout", "ranks", "metric", "state")
    lines = [("*" if found is first else "", *_cells(found)) for found in catalogue]
    spare = ("own", "bytes", "ranks", "layout", "metric", "when", "size")
    print_table(headings, lines, right=("step", "size", "own", "ranks", "metric"), droppable=spare)
    remarks = [f"{found.name}: {found.problem}" for found in catalogue if found.problem]
    remarks += [problem.what for problem in catalogue.problems if not problem.name]
    remarks += _attempt_note(catalogue.found)
    console = stdout()
    for text in ("", *remarks) if remarks else ():
        console.print(text, soft_wrap=not console.is_terminal)


def _attempt_note(found: Sequence[FoundCheckpoint]) -> list[str]:
    """What the number after the step in a name means, if any name has one."""
    later = next((one for one in found if one.attempt > 1), None)
    if later is None:
        return []
    ordinal = {2: "2nd", 3: "3rd"}.get(later.attempt, f"{later.attempt}th")
    return [f"{later.name}: saved after the run was opened for the {ordinal} time; a higher number is always newer"]


def _cells(found: FoundCheckpoint) -> list[str]:
    from datetime import datetime

    from closeranks.telemetry.terminal_table import size

    status = f"{found.status}, latest" if found.is_latest else found.status
    manifest = found.manifest
    if manifest is None:
        return [found.name, str(found.step), *[""] * 7, status]
    return [
        found.name,
        str(manifest.step),
        datetime.fromtimestamp(manifest.created).strftime("%Y-%m-%d %H:%M:%S"),
        size(manifest.num_bytes),
        size(manifest.own_bytes),
        "full" if manifest.is_full else "refs",
        manifest.layout,
        str(manifest.num_ranks),
        "" if manifest.metric is None else f"{manifest.metric:.6g}",
        status,
    ]


def _row(found: FoundCheckpoint, *, is_next: bool) -> dict[str, Any]:
    manifest = found.manifest
    fields: dict[str, Any] = {
        "name": found.name,
        "path": found.path,
        "step": found.step,
        "part": found.attempt,
        "state": found.status,
        "problem": found.problem,
        "is_latest": found.is_latest,
        "is_next": is_next,
    }
    if manifest is not None:
        fields |= {
            "created": manifest.created,
            "num_bytes": manifest.num_bytes,
            "own_bytes": manifest.own_bytes,
            "is_full": manifest.is_full,
            "refers_to": sorted(manifest.referenced_files()),
            "layout": manifest.layout,
            "num_ranks": manifest.num_ranks,
            "metric": manifest.metric,
        }
    return fields
