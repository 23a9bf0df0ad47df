"""``closeranks agent``: joins a job that another host leads, and runs workers on this host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Join a job that another host leads, and run workers on this host.

\b
  closeranks train job.toml -n 4 --hosts 2 --listen 10.0.0.1:29400     on the first host, the leader
  closeranks agent --join 10.0.0.1:29400 -n 4 --token-file job.token   on every other host

It begins when that many hosts have joined. A host that joins later makes the run larger at its next step, one that
is lost or leaves (Ctrl-C, SIGTERM) makes it smaller; neither loses more than a step. The job's token proves that a host
belongs to it: the leader writes one to the run folder unless both are given the same. Hosts share the file system with
the run folder and the job's code. Exit status: 0 the job is over or this host has left, 1 the leader was lost, 2
something needs fixing.
"""


def register(app: typer.Typer) -> None:
    app.command("agent", help=HELP, short_help="Join a job that another host leads.")(agent)


def agent(
    join: Annotated[str, typer.Option(help="Address of the leader.", metavar="HOST:PORT")],
    num_workers: Annotated[int, typer.Option("-n", "--workers", min=0, help="Workers; 0: one per GPU, or one.")] = 0,
    token_file: Annotated[Path | None, typer.Option(help="The job's token; else CLOSERANKS_TOKEN is read.")] = None,
    name: Annotated[str, typer.Option(help="Name of this host in the job; default: its host name.")] = "",
) -> None:
    import re
    import sys

    from closeranks.agent.remote_agent import RemoteAgent
    from closeranks.agent.transport.token import host_token
    from closeranks.core.errors import SetupError
    from closeranks.core.system.environment import job_token, num_gpus
    from closeranks.core.system.process_title import set_title

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    token = host_token(token_file, job_token(), say)
    if name and not re.fullmatch(r"\w[\w.-]{0,199}", name):
        raise SetupError(
            f"'{name}' is not a host name", "Use letters, digits, dots and dashes; start with a letter or digit."
        )
    set_title("agent", f"joins {join}")
    remote_agent = RemoteAgent(join, token, name=name, num_workers=num_workers or num_gpus() or 1, on_note=say)
    say(f"The job is over for this host: {remote_agent.run()}.")
