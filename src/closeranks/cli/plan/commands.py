"""``closeranks plan``: what to expect before machines are paid for; one file per verb."""

from __future__ import annotations

import importlib

import typer

HELP = """Say what to expect of a run before its machines are paid for.

Nothing is started and torch is not imported, except by calibrate, which measures.

\b
  closeranks plan goodput --devices 1024 --days 30     how much of the time trains, and how many spares pay
  closeranks plan calibrate job.toml                   measure this machine, for plans that rest on it
"""
VERBS = ("goodput", "calibrate")

plan = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)


@plan.callback()
def plan_group() -> None:
    """A group, even with a single verb."""


def register(app: typer.Typer) -> None:
    for verb in VERBS:
        importlib.import_module(f"closeranks.cli.plan.{verb}").register(plan)
    app.add_typer(plan, name="plan", short_help="Say what to expect of a run before it starts.")
