"""``closeranks compare``: runs one job under several settings, and reports what each gains and loses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Run one job under several settings, and say what each gains and loses.

\b
  closeranks compare examples/compare/layouts.toml
  closeranks compare compare.toml seeds=[0,1,2,3] budget.steps=500
  closeranks compare compare.toml --retry

\b
A whole compare.toml:
  job = "job.toml"                 # beside this file, or in the working folder
  workers = 2
  seeds = [0, 1, 2]                # every setting runs with each of them
  target = { metric = "loss", value = 2.1 }
  price_per_worker_hour = 0.4
  [budget]
  steps = 300                      # or epochs, as the job counts; or seconds; left out: the job's own length
  [[setting]]
  name = "as it is"                # the first one is the baseline
  [[setting]]
  name = "large buckets"
  set.sync.bucket_mib = 100        # or: set = ["sync.bucket_mib=100"]
  [network]                        # only as root: network namespaces
  hosts = 2
  mbit = 100
  delay_ms = 5
  [[condition]]                    # optional: a table for each
  name = "one slow worker"
  faults = "slow(rank=0, step=1, steps=300, share=0.3)"    # as train --faults takes them; rank=-1: the last one

Each run is a `closeranks train` of its own; settings take turns. A setting that fails or diverges is a row of the table
with its reason. Bytes are counted at the network interface, where root may make a namespace for the run. Written to
runs/compare-NAME: compare.md, compare.json, runs.csv, curves.png, bars.png and every run. Run again, it continues
with the missing runs; a change of target or price needs no new run. Checkpoints, reports and second copies
of the runs are off unless a setting turns them on. Exit status: 0 compared, 1 no run finished, 2 something needs
fixing, 130 interrupted, 143 terminated, 129 disconnected.
"""


def register(app: typer.Typer) -> None:
    app.command("compare", help=HELP, short_help="Run a job under several settings: gains, losses, advice.")(compare)


def compare(
    file: Annotated[Path, typer.Argument(help="What to compare.", metavar="COMPARE.toml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values of the comparison to change.", metavar="[KEY=VALUE]...")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed before.")] = False,
) -> None:
    from closeranks.lab.compare.comparison import run_comparison

    result = run_comparison(file, tuple(overrides or ()), retry=retry)
    if not any(row.num_sound for table in result.tables for row in table.rows):
        raise typer.Exit(1)
