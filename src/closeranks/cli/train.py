"""``closeranks train``: trains a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Train the job of a TOML file on -n workers of this machine.

\b
  closeranks train examples/tiny.toml -n 2
  closeranks train job.toml -n 4 train.steps=500 optim.lr=3e-4 run.folder=runs/try
  closeranks train job.toml checkpoint.resume=runs/job train.steps=1000
  closeranks train job.toml -n 4 --hosts 2 --listen 10.0.0.1:29400
  torchrun --nproc-per-node 2 -m closeranks train job.toml

The third continues an earlier run; the fourth waits for another host's `closeranks agent --join`; torchrun and srun
start the workers themselves. Every key of the file can be set as table.key=value and unset as '~table.key';
`closeranks config job.toml --explain` lists them. Ctrl-C finishes the step, saves if that takes no longer than
agent.interrupt_s (1.5 s), and stops; a second Ctrl-C stops at once. A run continues when nobody reads its output or its
terminal or pipe is gone, unless it gets SIGHUP. Exit status: 0 trained, 1 a worker was lost, 2
something in the job, the data or the machine needs fixing, 130 interrupted by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP.
"""


def register(app: typer.Typer) -> None:
    app.command("train", help=HELP, short_help="Train a job on the workers of this machine.")(train)


def train(
    job: Annotated[Path, typer.Argument(help="The job file.", metavar="JOB.toml")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Values to change; '~table.key' unsets one.", metavar="[TABLE.KEY=VALUE]..."),
    ] = None,
    num_workers: Annotated[
        int, typer.Option("-n", "--workers", min=0, help="Workers; 0: one per GPU, or as many as the layout takes.")
    ] = 0,
    profile: Annotated[str, typer.Option(help="Trace these steps with the torch profiler, such as 10:13.")] = "",
    hosts: Annotated[str, typer.Option(help="Hosts to start with, including this one; 1:4 grows to 4.")] = "1",
    listen: Annotated[str, typer.Option(help="Where other hosts may join.", metavar="ADDRESS[:PORT]")] = "",
    token_file: Annotated[Path | None, typer.Option(help="File of the token that joining hosts must have.")] = None,
    faults: Annotated[str, typer.Option(help='Inject faults into workers of this host: "kill(rank=1, step=40)".')] = "",
) -> None:
    from closeranks.run.job import launch

    changes = [*(overrides or []), *([f'telemetry.profile="{profile}"'] if profile else [])]
    job_hosts = launch.JobHosts(*launch.parse_hosts(hosts), listen, token_file)
    if not faults.strip():
        launch.train(job, changes, num_workers, hosts=job_hosts)
        return
    from closeranks.lab.drills.drill import train_with_faults

    train_with_faults(job, changes, num_workers, faults, job_hosts)
