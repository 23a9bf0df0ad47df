"""``closeranks run``: runs a user's own script on several workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Run your own Python script on -n workers of this machine.

\b
  closeranks run -n 2 my_script.py --epochs 3

The script opens a closeranks.Session (or calls closeranks.train) and finds its rank by itself; under
plain `python my_script.py` it is the only worker. Everything after the script's name is the script's.
"""

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def register(app: typer.Typer) -> None:
    app.command("run", help=HELP, short_help="Run your own script on several workers.", context_settings=_PASS_ON)(run)


def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Your script.", metavar="SCRIPT.py")],
    num_workers: Annotated[int, typer.Option("-n", "--workers", min=0, help="Workers; 0: one per GPU, or one.")] = 0,
) -> None:
    from closeranks.run.job import launch

    launch.run_script(script, context.args, num_workers)
