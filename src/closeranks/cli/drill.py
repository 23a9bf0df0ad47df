"""``closeranks drill``: injects faults into a job, and compares it with an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from closeranks.elastic.faults.fault import KINDS

_KINDS = "\n".join(f"  {kind.name:<10} {kind.meaning}" for kind in KINDS.values())
HELP = f"""Inject real faults into a job, and compare it with the run that never failed.

\b
  closeranks drill job.toml -n 4
  closeranks drill job.toml -n 4 --faults kill,hang,slow,oom,bitflip,diskfull --count 20 --seed 7
  closeranks drill job.toml -n 4 --faults "kill(rank=1, step=3), stop(rank=0, step=9)"
  closeranks drill job.toml -n 4 train.steps=40 layout="zero=3"

The job runs twice: undisturbed, then with faults, each with run.deterministic and elastic.snapshot_every=1. A table
shows for each fault the time to detection and until the ranks were back, how many finished steps were done
again, and whether losses and state are those of the undisturbed run, bit by bit.

\b
Faults, all injected from outside the workers:
{_KINDS}

A bare kind gets its step and rank from --seed. In full: kill(rank=1, step=3, at=0.5), where at
is how far into the step; slow(rank=1, step=3, steps=5, share=0.2); kill2(rank=0, other=2, step=3); diskfull(step=3,
steps=4). slow and oom need control groups that this user may create, diskfull needs root. Everything is written to
runs/drill-JOB: both runs, drill.md and drill.json. Exit status: 0 all faults were survived and both runs are equal, 1
not, 2 something in the job or the machine needs fixing.
"""


def register(app: typer.Typer) -> None:
    app.command("drill", help=HELP, short_help="Inject faults into a job, and check that the result is the same.")(
        drill
    )


def drill(
    job: Annotated[Path, typer.Argument(help="The job file.", metavar="JOB.toml")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Values to change; '~table.key' unsets one.", metavar="[TABLE.KEY=VALUE]..."),
    ] = None,
    num_workers: Annotated[
        int, typer.Option("-n", "--workers", min=0, help="Workers; 0: one per GPU, or as many as the layout takes.")
    ] = 0,
    faults: Annotated[
        str,
        typer.Option(help="Kinds, or faults in full, separated by commas; default: every kind possible here."),
    ] = "",
    count: Annotated[int, typer.Option(min=0, help="How many faults to draw of the kinds; 0: one of each.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same faults.")] = 0,
    folder: Annotated[str, typer.Option(help="Folder of both runs; default: runs/drill-JOB.")] = "",
) -> None:
    from closeranks.elastic.faults.grammar import parse_faults
    from closeranks.lab.drills.drill import DrillRequest, possible_kinds
    from closeranks.lab.drills.drill import run_drill as run
    from closeranks.run.job.job import load_job
    from closeranks.run.job.launch import num_workers_for

    changes = tuple(overrides or ())
    if faults.strip():
        asked = parse_faults(faults)
    else:
        asked, unavailable = possible_kinds(num_workers_for(load_job(job, changes).value, num_workers))
        for kind, reason in unavailable.items():
            typer.echo(f"{kind} is left out, it is not possible here: {reason}.")
    command = _command(job, changes, num_workers, faults, count, seed)
    if not run(DrillRequest(job, changes, num_workers, asked, count, seed, folder, command)):
        raise typer.Exit(1)


def _command(job: Path, changes: tuple[str, ...], num_workers: int, faults: str, count: int, seed: int) -> str:
    """The command line that repeats this drill."""
    import shlex

    flags = [*(["-n", str(num_workers)] if num_workers else []), *(["--faults", faults] if faults.strip() else [])]
    flags += [*(["--count", str(count)] if count else []), "--seed", str(seed)]
    return shlex.join(["closeranks", "drill", str(job), *flags, *changes])
