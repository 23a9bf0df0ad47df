"""The entry points of a worker: the functions that the agent's zygote calls in a forked process.

A worker trains a job, or runs a user's script that opens a session. Imported by the zygote before it forks, so that
torch and this package are loaded once per host.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  each worker's first step would import it and the one below
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy.ma  # noqa: F401

from closeranks.agent.workers.worker_link import WorkerLink
from closeranks.core.errors import ENDINGS, Interrupted
from closeranks.core.system.environment import detect_world
from closeranks.facts.prices import load_prices
from closeranks.run.diagnosis import findings_section
from closeranks.run.job.job import Job
from closeranks.run.loop import run_session, train_job
from closeranks.run.session import Session
from closeranks.run.worker.agent_client import StandaloneClient, configure_worker
from closeranks.run.worker.collective_hooks import record_collectives
from closeranks.run.worker.error_output import ReportTurn, describe_failure, print_error, report_turn
from closeranks.run.worker.generation_cache import load_payload
from closeranks.run.worker.rendezvous import count_failure, wait_for_all_ranks
from closeranks.telemetry.goodput.loss_target import tell_target
from closeranks.telemetry.live.progress import ProgressDisplay
from closeranks.telemetry.reports.pages import write_pages


def train_entry(payload: dict[str, Any], link: WorkerLink) -> int:
    """Train the job of the payload in the folder that the command line prepared."""
    configure_worker(link=link)
    record_collectives()
    load_payload(payload)
    train_job(Job.model_validate(payload["job"]), Path(payload["folder"]).absolute())
    return 0


def script_entry(payload: dict[str, Any], link: WorkerLink) -> int:
    """Run a user's script as ``python script.py args`` would; its sessions use this worker's world."""
    configure_worker(link=link, folder=Path(payload["folder"]))
    record_collectives()
    load_payload(payload)
    sys.argv = [payload["script"], *payload["args"]]
    sys.path.insert(0, str(Path(payload["script"]).resolve().parent))
    try:
        runpy.run_path(payload["script"], run_name="__main__")
    except SystemExit as error:  # which is how many scripts end: sys.exit(main())
        if error.code:
            raise
    return 0


def train_in_process(job: Job, job_file: str, overrides: Sequence[str]) -> NoReturn:
    """Train in this process, which torchrun or srun has started.

    It exits as the agent's workers do, without interpreter shutdown: a torch thread that runs during the shutdown
    sometimes aborts the process, and a finished run would count as failed.
    """
    status = 1
    try:
        status = _train_as_one_of_many(job, job_file, overrides)
    except KeyboardInterrupt:
        status = Interrupted.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _train_as_one_of_many(job: Job, job_file: str, overrides: Sequence[str]) -> int:
    """Train as one rank of many; returns the exit status. Rank 0 prints the progress and writes the report.

    If a signal ended the run, only rank 0 exits with a status that says so: if another rank exited with one earlier,
    the launcher would kill rank 0 before it has written the report.
    """
    world, failure, session = detect_world(), "", None
    with ProgressDisplay(log_every=job.telemetry.log_every, prices=load_prices(job.telemetry.prices)) as progress:
        client = StandaloneClient(progress.handle)
        configure_worker(agent_client=client)
        try:
            wait_for_all_ranks(world)  # before anything can fail: failed ranks are counted there
            session = Session.from_job(_named(job, Path(job_file).stem))
            client.install_signal_handlers()
            result = run_session(session)
        except Exception as error:
            described = describe_failure(error, world, session.num_done if session else 0)
            print_error(described, report_turn(error, world, count_failure(world)))
            failure = str(described)
            return described.exit_code
        finally:
            if session and world.is_lead:
                tell_target(session.folder, progress.print_line)
            if session and world.is_lead and job.telemetry.report:
                write_pages(
                    session.folder,
                    progress.print_line,
                    job_file=job_file,
                    overrides=overrides,
                    failure=failure,
                    findings=findings_section,
                )
    if not world.is_lead or result.reason != "drained":
        return 0
    ending = ENDINGS[client.end_reason](
        f"stopped at step {result.steps}", f"Resume via checkpoint.resume={result.folder}."
    )
    print_error(ending, ReportTurn.NOW)
    return ending.exit_code


def _named(job: Job, stem: str) -> Job:
    return job if job.run.name else job.model_copy(update={"run": job.run.model_copy(update={"name": stem})})
