"""What does a worker do from its fork to its end? The entry that the agent's zygote calls.

It trains a job, or runs a user's script in which a session will open. Imported by the zygote before it forks, so that
torch and everything of ours is loaded once per host.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from closeranks.agent.link import WorkerLink
from closeranks.run.hooks import Hook
from closeranks.run.job import Job
from closeranks.run.loop import train_job
from closeranks.run.overseer import Alone, settle_in
from closeranks.run.session import Session
from closeranks.telemetry.picture import draw
from closeranks.telemetry.progress import Progress
from closeranks.telemetry.report import write_report


def train_entry(payload: dict[str, Any], link: WorkerLink) -> int:
    """Train the job of the payload in the folder the command line prepared."""
    settle_in(link=link)
    train_job(Job.model_validate(payload["job"]), Path(payload["folder"]))
    return 0


def script_entry(payload: dict[str, Any], link: WorkerLink) -> int:
    """Run a user's script as ``python script.py args`` would; its sessions find this worker's world."""
    settle_in(link=link, folder=Path(payload["folder"]))
    sys.argv = [payload["script"], *payload["args"]]
    sys.path.insert(0, str(Path(payload["script"]).resolve().parent))
    runpy.run_path(payload["script"], run_name="__main__")
    return 0


def train_here(job: Job, stem: str) -> None:
    """Train in this very process, which torchrun or srun has started; rank 0 shows the progress itself."""
    settle_in(overseer=Alone(listen=True))
    named = job if job.run.name else job.model_copy(update={"run": job.run.model_copy(update={"name": stem})})
    train_job(named, hooks=[_Narrator(job)])


class _Narrator(Hook):
    """What the command line shows under our own agent, shown by rank 0 where there is none."""

    def __init__(self, job: Job) -> None:
        self._progress = Progress(log_every=job.telemetry.log_every)

    def on_start(self, session: Session) -> None:
        if session.world.is_lead:
            session.recorder.add_sink(self._progress.handle)

    def on_end(self, session: Session) -> None:
        self._progress.close()
        if session.world.is_lead and session.job.telemetry.report:
            draw(session.folder)
            print(f"report: {write_report(session.folder)}")
