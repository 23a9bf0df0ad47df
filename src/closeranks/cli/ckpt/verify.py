"""``closeranks ckpt verify``: checks that every byte is what it was when it was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from closeranks.cli.terminal import safe_echo

if TYPE_CHECKING:
    from closeranks.checkpoint.load.verify import VerifyFinding

HELP = """Read every byte of a run's checkpoints, or of one, and compare it with the digests taken when it was saved.

\b
  closeranks ckpt verify runs/tiny
  closeranks ckpt verify runs/tiny/checkpoints/step-00000040
  closeranks ckpt verify s3://bucket/runs/tiny --json

Every finding names its checkpoint, file and tensor. Exit status: 0 all is sound, 1 damage was found, 2 nothing to
verify.
"""

_MAX_LINES = 10
"""Maximum lines about one file: a missing file may affect thousands of tensors."""


def register(app: typer.Typer) -> None:
    app.command("verify", help=HELP, short_help="Read every byte and name what is damaged.")(verify)


def verify(
    place: Annotated[
        str, typer.Argument(help="A run, its checkpoints, one of them, or a URL of those.", metavar="RUN|PATH|URL")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON, for programs.")] = False,
) -> None:
    import json
    import time
    from dataclasses import asdict

    from closeranks.checkpoint.load.verify import VerifiedChunks, num_bytes_to_verify, verify_all
    from closeranks.run.state.checkpoint_lookup import require_checkpoints
    from closeranks.telemetry.terminal_table import size

    catalogue, verified, started_at = require_checkpoints(place), VerifiedChunks(), time.monotonic()
    with _bar(num_bytes_to_verify(catalogue)) as on_progress:
        findings = verify_all(catalogue, on_progress, verified)
    seconds = max(time.monotonic() - started_at, 1e-9)
    damage = [finding for finding in findings if finding.is_damage]
    num_sealed = sum(found.manifest is not None for found in catalogue)
    if as_json:
        counts = {"num_checkpoints": num_sealed, "num_chunks": verified.num_chunks, "num_bytes": verified.num_bytes}
        rows = [asdict(finding) for finding in findings]
        print(json.dumps({**counts, "seconds": seconds, "is_sound": not damage, "findings": rows}, indent=1))
    else:
        for line in _lines(findings):
            safe_echo(line)
        what = f"{num_sealed} checkpoint{'' if num_sealed == 1 else 's'}, {verified.num_chunks:,} chunks"
        rate = f"{size(verified.num_bytes)} in {seconds:.1f} s, {verified.num_bytes / seconds / 1e9:.2f} GB/s"
        wrong = {finding.checkpoint or finding.what for finding in damage}
        safe_echo(f"{what}: {f'{len(wrong)} damaged' if wrong else 'all sound'} ({rate})")
        sound = [found.name for found in catalogue if found.manifest is not None and found.name not in wrong]
        if wrong and sound:
            safe_echo(f"The newest sound one is {sound[0]}: a run that resumes skips damaged ones.")
    if damage:
        raise typer.Exit(1)


def _lines(findings: Sequence[VerifyFinding]) -> Iterator[str]:
    """One line for each fault; tensors with the same fault, such as those of a missing file, are only counted."""
    from dataclasses import replace

    files: dict[tuple[str, str], dict[tuple[str, bool], list[VerifyFinding]]] = {}
    for finding in findings:
        faults = files.setdefault((finding.checkpoint, finding.file), {})
        faults.setdefault((finding.what, finding.is_damage), []).append(finding)
    for faults in files.values():
        for held in list(faults.values())[:_MAX_LINES]:
            num_tensors = len({finding.tensor for finding in held} - {""})
            finding = held[0] if num_tensors < 2 else replace(held[0], tensor="")
            more = f" ({num_tensors} tensors)" if num_tensors > 1 else ""
            yield f"{'DAMAGED' if finding.is_damage else 'note   '}  {finding}{more}"
        if len(faults) > _MAX_LINES:
            yield f"         and {len(faults) - _MAX_LINES} more of this file: --json names them all"


@contextmanager
def _bar(num_bytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("verifying", total=num_bytes)
        yield lambda done: progress.update(task, advance=done)
