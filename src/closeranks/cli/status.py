"""``closeranks status``: shows the workers, hosts, step and last events of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from closeranks.cli.terminal import safe_echo

if TYPE_CHECKING:
    from rich.console import Console

    from closeranks.telemetry.live.status import RunStatus, StatusFreshness

HELP = """Show the status of a run: its workers and hosts, generation, step and last events.

\b
  closeranks status runs/tiny
  closeranks status runs/tiny --watch
  closeranks status --json

Without a folder it is the newest run under runs/. If the run's agent cannot be found any more, the last known
status is shown. --watch refreshes it until the run has ended; --json prints one object, for machines.
"""

_WATCH_S = 0.5


def register(app: typer.Typer) -> None:
    app.command("status", help=HELP, short_help="Show the status of a run.")(status)


def status(
    run: Annotated[
        Path | None, typer.Argument(help="The run's folder; the newest when left out.", metavar="RUN")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh it until the run has ended.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")] = False,
) -> None:
    folder = _folder(run)
    if watch:
        _watch(folder, as_json)
    else:
        found, freshness = _read(folder)
        safe_echo(_text(folder, found, freshness, as_json))


def _folder(run: Path | None) -> Path:
    from closeranks.core.errors import UserError
    from closeranks.telemetry.run_log.run_folder import newest_run

    if run is None:
        newest = newest_run(Path("runs"))
        if newest is None:
            raise UserError("there is no run under runs/", "Name the run's folder: closeranks status RUN.")
        return newest
    return existing_run(run)


def existing_run(run: Path) -> Path:
    """``run`` itself, if it is a run folder."""
    from closeranks.core.errors import UserError
    from closeranks.telemetry.run_log.run_folder import RunFolder

    if not run.is_dir():
        raise UserError(f"there is no folder {run}", "Name the folder that `closeranks train` printed.")
    if not RunFolder(run).is_run:
        raise UserError(f"{run} is not a run folder", "Name the folder that `closeranks train` printed.")
    return run


def _read(folder: Path) -> tuple[RunStatus, StatusFreshness]:
    from closeranks.telemetry.live.status import is_alive, read_status, status_freshness

    found = read_status(folder) or _unwatched(folder)
    return found, status_freshness(found, time.time(), is_alive(found.writer))


def _unwatched(folder: Path) -> RunStatus:
    """The status of a run that has no agent, as far as its metrics tell."""
    from closeranks.telemetry.goodput.loss_target import load_target
    from closeranks.telemetry.goodput.run_account import load_account
    from closeranks.telemetry.live.status import UNWATCHED, RunStatus
    from closeranks.telemetry.run_log.run_folder import RunFolder
    from closeranks.telemetry.run_log.run_history import load_history

    run, history = RunFolder(folder), load_history(folder)
    notes = ["status.json cannot be read: this is from the metrics", *history.notes]
    path = run.metrics(0) if run.metrics(0).exists() else run.job
    started = history.started
    return RunStatus(
        run=str(folder),
        state=UNWATCHED if history.ended is None else history.ended.reason,
        at=path.stat().st_mtime,
        step=history.steps[-1].step if history.steps else 0,
        num_steps=started.last_step if started else 0,
        generation=started.generation if started else 0,
        world_size=started.world_size if started else 0,
        device=started.device if started else "",
        item=started.item if started else "token",
        account=load_account(folder),
        target=load_target(folder),
        notes=notes if run.status.exists() else notes[1:],
    )


def _text(folder: Path, found: RunStatus, freshness: StatusFreshness, as_json: bool) -> str:
    from closeranks.telemetry.goodput.run_cost import find_price
    from closeranks.telemetry.live.status import encode_status
    from closeranks.telemetry.live.status_text import status_text

    now = time.time()
    price, note = find_price(folder, found.device)
    if as_json:
        cost = None if price is None else {"amount": price.cost(found.account.device_hours), "currency": price.currency}
        more = {"goodput": found.account.goodput, "device_hours": found.account.device_hours, "cost": cost}
        return encode_status(found, heard=freshness.value, age_s=round(max(0.0, now - found.at), 3), **more)
    text = status_text(found, freshness, now, price)
    return f"{text}\n{note}" if note else text


def _watch(folder: Path, as_json: bool) -> None:
    """Refresh until the run has ended or its status cannot be known any more; Ctrl-C is a normal exit, not an error."""
    from rich.console import Console

    console = Console()
    try:
        if console.is_terminal and not as_json:
            _redraw(folder, console)
        else:
            _print_changes(folder, as_json)
    except KeyboardInterrupt:
        return


def _read_repeatedly(folder: Path) -> Iterator[tuple[RunStatus, StatusFreshness]]:
    """The status again and again, up to the one after which it cannot change any more."""
    from closeranks.telemetry.live.status import StatusFreshness

    while True:
        found, freshness = _read(folder)
        yield found, freshness
        if freshness in (StatusFreshness.ENDED, StatusFreshness.GONE, StatusFreshness.UNWATCHED):
            return
        time.sleep(_WATCH_S)


def _redraw(folder: Path, console: Console) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, auto_refresh=False) as live:
        for found, freshness in _read_repeatedly(folder):
            live.update(Text(_text(folder, found, freshness, False)), refresh=True)


def _print_changes(folder: Path, as_json: bool) -> None:
    """Print a line for each change, since a file or a pipe cannot be redrawn."""
    from closeranks.telemetry.live.status_text import one_line

    last = ""
    for found, freshness in _read_repeatedly(folder):
        text = (
            _text(folder, found, freshness, True).replace("\n", "")
            if as_json
            else one_line(found, freshness, time.time())
        )
        if text != last:
            safe_echo(text)
        last = text
