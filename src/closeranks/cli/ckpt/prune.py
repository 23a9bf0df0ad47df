"""``closeranks ckpt prune``: removes old checkpoints, but no file that is still needed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from closeranks.checkpoint.save.retention import CheckpointFolder, RemovalPlan, RetentionPolicy
    from closeranks.storage.protocol import Storage

HELP = """Remove the checkpoints of a run that nobody needs any more, and what failed saves left behind.

\b
  closeranks ckpt prune runs/tiny --dry-run
  closeranks ckpt prune runs/tiny --keep-last 5 --keep-every 1000
  closeranks ckpt prune s3://bucket/run --keep-last 2 --keep-best 3

The newest two always stay, and so does every file that a checkpoint which stays refers to. There is no prompt: see what
would be removed with --dry-run first. Refused while a run saves there. Exit status: 0 done, 2 something needs fixing.
"""


def register(app: typer.Typer) -> None:
    app.command("prune", help=HELP, short_help="Remove old checkpoints and what failed saves left.")(prune)


def prune(
    run: Annotated[str, typer.Argument(help="A run's folder, a folder of checkpoints, or a URL.", metavar="RUN")],
    keep_last: Annotated[int, typer.Option(min=2, help="How many of the newest stay.")] = 3,
    keep_every: Annotated[int, typer.Option(min=0, help="Those stay whose step is a multiple of this; 0: none.")] = 0,
    keep_best: Annotated[int, typer.Option(min=0, help="How many of the best by evaluated loss stay.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
) -> None:
    from closeranks.checkpoint.save.retention import RetentionPolicy
    from closeranks.core.errors import CheckpointError
    from closeranks.storage.protocol import DeniedError, StorageError

    try:
        _prune(run, RetentionPolicy(keep_last, keep_every, keep_best), dry_run)
    except DeniedError as error:
        raise CheckpointError(f"{run} cannot be pruned now: {error}") from error
    except StorageError as error:
        raise CheckpointError(
            f"{run} could not be pruned: {error}", "What was removed is gone for good; try again."
        ) from error


@dataclass(frozen=True, slots=True)
class PrunedFolder:
    """What is removed from one folder."""

    name: str
    why: str
    num_bytes: int


def _prune(run: str, policy: RetentionPolicy, dry_run: bool) -> None:
    from closeranks.checkpoint.save import retention

    storage = _checkpoint_storage(run)
    with nullcontext() if dry_run else storage.lock("closeranks ckpt prune"):
        folders = retention.list_folders(storage)
        committed = [folder.name for folder in folders if folder.contents is not None]
        newest = max(committed, key=retention.age_key, default="")
        removal = retention.plan_removal(folders, policy, newest, retention.named_by_latest(storage))
        pruned = _pruned_folders(storage, folders, removal)
        if not dry_run:
            retention.apply_removal(storage, removal)
    _print_pruned(pruned, len(committed) - len(removal.checkpoints), dry_run)


def _checkpoint_storage(run: str) -> Storage:
    """The storage of the run's checkpoints; refuses the path of one checkpoint, since all of them are pruned."""
    from closeranks.checkpoint.format.manifest import parse_folder
    from closeranks.core.errors import CheckpointError
    from closeranks.run.state.checkpoint_lookup import require_checkpoints

    if parse_folder(run.rstrip("/").rpartition("/")[2]) is not None:
        raise CheckpointError(
            f"{run} is one checkpoint, and prune chooses among all of a run", "Name the run's folder."
        )
    return require_checkpoints(run).found[0].storage


def _pruned_folders(storage: Storage, folders: Sequence[CheckpointFolder], removal: RemovalPlan) -> list[PrunedFolder]:
    """What is removed, by folder; one whose data others need frees little more than its manifest."""
    from closeranks.checkpoint.format.manifest import MANIFEST

    found: list[PrunedFolder] = []
    for folder in folders:
        files = [name for name in removal.files if name.startswith(f"{folder.name}/")]
        if folder.name in removal.folders:
            files = [f"{folder.name}/{file}" for file in folder.files]
        elif folder.name in removal.checkpoints:
            files.append(f"{folder.name}/{MANIFEST}")
        if folder.name in removal.checkpoints:
            why = "checkpoint" if folder.name in removal.folders else "checkpoint; others still need files of it"
        else:
            why = "not used by any checkpoint"
        if files or folder.name in removal.folders:
            found.append(PrunedFolder(folder.name, why, sum(storage.size(name) for name in files)))
    return found


def _print_pruned(pruned: Sequence[PrunedFolder], num_left: int, dry_run: bool) -> None:
    from closeranks.telemetry.terminal_table import print_table, size

    if pruned:
        rows = [(row.name, row.why, size(row.num_bytes)) for row in pruned]
        print_table(("would go" if dry_run else "gone", "what", "frees"), rows, right=("frees",))
    freed = size(sum(row.num_bytes for row in pruned))
    stays = "1 checkpoint stays" if num_left == 1 else f"{num_left} checkpoints stay"
    if not pruned:
        typer.echo(f"Nothing to remove; {stays}.")
    else:
        typer.echo(f"\n{freed} would be freed; {stays}." if dry_run else f"\n{freed} freed; {stays}.")
