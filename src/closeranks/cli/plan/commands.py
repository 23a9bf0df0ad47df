"""``closeranks plan``: what to expect before machines are paid for; one file per verb."""

from __future__ import annotations

import importlib

import typer

from closeranks.cli.plan.group import PlanGroup

HELP = """Say what to expect of a run before its machines are paid for.

Nothing is started. Torch is imported by calibrate, which measures, by dry-run, and for a model of your own alone.

\b
  closeranks plan job.toml --cluster 64xh100           every layout: time, memory, days, money; and why
  closeranks plan job.toml --cluster 64xh100 --out planned.toml     the best of them, as a job file to train
  closeranks plan scale job.toml --cluster h100 --from 8 --to 1024  how it scales, and what helps next
  closeranks plan dry-run job.toml --ranks 1024        what one rank holds and sends, run without memory
  closeranks plan goodput --devices 1024 --days 30     how much of the time trains, and how many spares pay
  closeranks plan calibrate job.toml                   measure this machine, for plans that rest on it
  closeranks plan check runs/tiny                      what was predicted of a run beside what it measured
  closeranks plan validate --runs runs.csv             predict published runs, and compare with what was measured

All options of the first: closeranks plan search --help
"""
VERBS = ("search", "scale", "dry_run", "goodput", "calibrate", "check", "validate")


def plan_group() -> None:
    """A group, even with a single verb."""


def register(app: typer.Typer) -> None:
    plan = typer.Typer(cls=PlanGroup, help=HELP, no_args_is_help=True, rich_markup_mode=None)
    plan.callback()(plan_group)
    for verb in VERBS:
        importlib.import_module(f"closeranks.cli.plan.{verb}").register(plan)
    app.add_typer(plan, name="plan", short_help="Say what to expect of a run before it starts.")
