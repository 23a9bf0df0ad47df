"""The entry point of the command line; each verb has a file of its own.

Invariants: nothing heavy is imported before a verb runs, so that help appears at once; every error that a user can fix
is one sentence on stderr and exit status 2; this module alone decides whether a verb continues when nobody reads its
output.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import typer

from closeranks import __version__
from closeranks.core.errors import CloseranksError, Interrupted, SetupError
from closeranks.core.printable import printable
from closeranks.core.system import stdio

_TOUR = """Train PyTorch models on one process or on many.

A first tour:

\b
  closeranks train examples/tiny.toml -n 2     train a job on two workers, here
  closeranks train job.toml train.steps=200    change any value of the job
  closeranks config job.toml --explain         every value, its origin, its meaning
  closeranks layout ls job.toml -n 8           every layout on eight workers, and what each costs
  closeranks plan job.toml --cluster 64xh100   which layout, how long, how much; and a job file of it
  closeranks plan goodput --devices 1024       a month of failures: what trains, how many spares pay
  closeranks status runs/tiny                  workers, hosts, step, last events
  closeranks doctor runs/tiny                  what holds it back, what to change, what that gains
  closeranks profile runs/tiny                 trace its next steps, all ranks in one file for Perfetto
  closeranks drill job.toml -n 4               inject faults: is the result the same?
  closeranks compare compare.toml              one job, several settings: what is gained, what is lost
  closeranks ckpt ls runs/tiny                 its checkpoints (also: ckpt verify, diff, convert)
  closeranks sample runs/tiny "import "        generate text with the model you trained
  closeranks run -n 2 my_script.py             your own loop on two workers

Every run writes a folder: report.md (one page), curve.png, metrics/ (JSON lines), logs/ and checkpoints/.
"""

VERBS = {
    "train": "train",
    "agent": "agent",
    "run": "run",
    "status": "status",
    "doctor": "doctor",
    "profile": "profile",
    "drill": "drill",
    "compare": "compare",
    "sample": "sample",
    "config": "config",
    "layout": "layout",
    "plan": "plan.commands",
    "data": "data.commands",
    "ckpt": "ckpt.commands",
    "report": "report",
}
"""Each verb's module in ``closeranks.cli``, in the order of ``closeranks --help``."""


def build_app(words: Sequence[str] = ()) -> typer.Typer:
    """The command line; if ``words`` begin with a verb, of that verb alone, so that no other is imported."""
    app = typer.Typer(
        name="closeranks",
        help=_TOUR,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(main_options)
    for verb in words[:1] if words and words[0] in VERBS else VERBS:
        importlib.import_module(f"closeranks.cli.{VERBS[verb]}").register(app)
    return app


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"closeranks {__version__}")
        raise typer.Exit


def main_options(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_print_version, is_eager=True),
) -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise SetupError("the working folder no longer exists", "Change to one that does.") from None


def _is_interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C arrived where no verb handles it: typer then exits without a message."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


_WORKING = ("train", "run", "agent", "drill", "compare", "report", "profile")
_WORKING_PAIRS = (
    *(("ckpt", verb) for verb in ("convert", "export-hf", "import-hf", "prune")),
    ("data", "build"),
)
_OUTPUT_TIMEOUT_S = 5.0
"""How long a terminal or pipe that is open but not read may block a run."""


def ignores_closed_output(words: Sequence[str]) -> bool:
    """Whether a command does work beyond what it prints.

    The others only print something, and end when nobody reads it, as ``ls`` in ``ls | head -1`` does.
    """
    return bool(words) and (words[0] in _WORKING or tuple(words[:2]) in _WORKING_PAIRS)


def main() -> None:
    if ignores_closed_output(sys.argv[1:]):
        stdio.ignore_broken_pipes(_OUTPUT_TIMEOUT_S)
    else:
        stdio.install_streams(("stderr",), required=False)
        stdio.install_streams(("stdout",), required=True)
    try:
        try:
            _run_app()
        finally:
            sys.stdout.flush()  # here, where an error is handled, rather than at interpreter exit
    except BrokenPipeError:
        sys.exit(stdio.READER_GONE)
    except CloseranksError as error:
        typer.echo(printable(f"closeranks: {error}"), err=True)
        sys.exit(error.exit_code)


def _run_app() -> None:
    try:
        build_app(sys.argv[1:])()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # click and rich exit with 1, which would mean a finding
            sys.exit(stdio.READER_GONE)
        if error.code == Interrupted.exit_code and _is_interrupted(error):
            typer.echo("closeranks: interrupted", err=True)
        is_reported = isinstance(error.__context__, CloseranksError)  # printed by a rank under torchrun or srun
        if error.code == 2 and sys.argv[1:2] == ["train"] and not is_reported:  # typer says what it did not understand
            typer.echo("Values of the job are written table.key=value, such as train.steps=200.", err=True)
        raise
