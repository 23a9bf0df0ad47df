"""Train the jobs of the golden record: undisturbed, stopped and resumed, resized, killed, drained.

Jobs that take equally many ranks are trained one after the other in one world, since starting processes takes longer
than training. Kills and drains are those of real ``closeranks train`` commands.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from closeranks import Hook, Session
from closeranks.core.events import StepDone
from closeranks.facts.layout import Layout
from closeranks.run.job.job import load_job
from closeranks.run.loop import run_session
from closeranks.telemetry.live.status import read_status
from closeranks.testing import run_world
from tests.cli.commands import IMPORTABLE, closeranks, started
from tests.faults.harness import wait_for_step
from tests.golden.jobs import JOBS, KILL_AT, RESIZED, STEPS, STOP_AT, Tables, write_data
from tests.golden.record import Record, read_run

_TIMEOUT_S = 900.0
HELD = "GOLDEN_HELD"
"""Environment variable: ``Paced`` waits until the agent says that it stops the run."""


class StopsHalfWay(Hook):
    def on_step(self, session: Session, step: StepDone) -> None:
        if step.step == STOP_AT:
            session.stop("to be resumed")


class Paced(Hook):
    """Keeps the first generation from ending before what is done to it from outside has been done: a kill finds half a
    second in each step, and a drain is waited for after the second step."""

    def on_step(self, session: Session, step: StepDone) -> None:
        if session.world.generation or step.step < 2:
            return
        while os.environ.get(HELD) and not ((told := read_status(session.folder)) and told.state == "stopping"):
            time.sleep(0.05)
        time.sleep(0.5)


# --- in worlds


@dataclass(frozen=True)
class _Part:
    """One part of a run, in a world."""

    run: str
    """Its folder."""
    tables: Tables
    resume: str = ""
    is_stopped: bool = False


def _train_parts(parts: Sequence[_Part]) -> None:
    torch.set_num_threads(1)
    for part in parts:
        tables = {**part.tables, "checkpoint": {**part.tables["checkpoint"], "resume": part.resume}}
        hooks = [StopsHalfWay()] if part.is_stopped else []
        try:
            result = run_session(Session.from_job(load_job(None, extra=tables).value, Path(part.run), hooks))
            assert (result.steps < STEPS) == part.is_stopped, f"it ended after step {result.steps}"
        except Exception as error:
            error.add_note(f"golden job: {part.run}")
            raise


def _train_all(parts: Iterable[_Part]) -> None:
    """By the number of ranks they take; the order of parts of one size is kept."""
    by_size: dict[int, list[_Part]] = {}
    for part in parts:
        by_size.setdefault(_num_ranks(part), []).append(part)
    for size, those in sorted(by_size.items()):
        run_world(_train_parts, size, those, timeout_s=_TIMEOUT_S)


def _num_ranks(part: _Part) -> int:
    return Layout(**part.tables["layout"]).num_ranks


def undisturbed(folder: Path, names: Iterable[str]) -> dict[str, Record]:
    write_data(folder / "data")
    runs = {name: folder / name / "run" for name in names}
    _train_all(_Part(str(run), JOBS[name].tables(folder / "data")) for name, run in runs.items())
    return {name: read_run(run) for name, run in runs.items()}


def resumed(folder: Path, names: Iterable[str]) -> dict[str, Record]:
    """Stopped half-way, then resumed from the checkpoint in the same folder."""
    write_data(folder / "data")
    parts = []
    for name in (names := list(names)):
        part = _Part(str(folder / name / "run"), JOBS[name].tables(folder / "data"), is_stopped=True)
        parts += [part, replace(part, resume="auto", is_stopped=False)]
    _train_all(parts)
    return {name: read_run(folder / name / "run") for name in names}


def resized(folder: Path, names: Iterable[str]) -> dict[str, Record]:
    """Stopped, then resumed with another layout in the same folder."""
    write_data(folder / "data")
    befores, afters = [], []
    for name in (names := list(names)):
        job, layout = RESIZED[name]
        run = str(folder / name / "run")
        befores.append(_Part(run, JOBS[job].tables(folder / "data"), is_stopped=True))
        afters.append(_Part(run, JOBS[job].tables(folder / "data", layout), resume="auto"))
    _train_all(befores)
    _train_all(afters)
    return {name: read_run(folder / name / "run") for name in names}


def made(folder: Path, names: Iterable[str]) -> dict[str, Record]:
    """All that is recorded, by name."""
    names = list(names)
    found = undisturbed(folder / "undisturbed", [name for name in names if name in JOBS])
    return {**found, **resized(folder / "resized", [name for name in names if name in RESIZED])}


# --- by the command line


def killed(folder: Path, name: str) -> Record:
    """Rank 1 is killed in step ``KILL_AT``; the run recovers from memory."""
    words = [*_command(folder, name), _PACED, "--faults", f"kill(rank=1, step={KILL_AT})"]
    done = closeranks(*words, cwd=folder, timeout_s=_TIMEOUT_S, env=IMPORTABLE)
    assert done.code == 0, done.err
    told = _events(folder / "run")
    assert [event["event"] for event in told if event["event"] in ("rank_lost", "ranks_closed")] == [
        "rank_lost",
        "ranks_closed",
    ], done.out
    assert {event["source"] for event in told if event["event"] == "restored"} == {"memory"}, done.out
    return read_run(folder / "run")


def drained(folder: Path, name: str) -> Record:
    """The agent is sent SIGTERM after the second step, saves and leaves; a second command resumes the run."""
    words = _command(folder, name)
    with started(*words, _PACED, cwd=folder, env={**IMPORTABLE, HELD: "1"}) as (process, _):
        wait_for_step(process, folder / "run", 2)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM, out + err
    assert not list(folder.glob(f"run/checkpoints/step-{STEPS:08d}*")), "it was drained too late"
    done = closeranks(*words, "checkpoint.resume=auto", cwd=folder, timeout_s=_TIMEOUT_S)
    assert done.code == 0, done.err
    return read_run(folder / "run")


_PACED = 'run.hooks=["tests.golden.running:Paced"]'


def _command(folder: Path, name: str) -> list[object]:
    """``closeranks train`` with the whole job as settings."""
    write_data(folder / "data")
    (folder / "job.toml").write_text('[run]\nfolder = "run"\n')
    job = JOBS[name]
    return ["train", "job.toml", "-n", job.num_ranks, *_settings(job.tables(folder / "data"))]


def _settings(table: Mapping[str, Any], place: str = "") -> list[str]:
    """JSON spells numbers, texts and truth values as TOML does."""
    found = []
    for key, value in table.items():
        is_table = isinstance(value, Mapping)
        found += _settings(value, f"{place}{key}.") if is_table else [f"{place}{key}={json.dumps(value)}"]
    return found


def _events(run: Path) -> list[dict[str, Any]]:
    """Of all ranks and the agent."""
    lines = (line for path in run.glob("metrics/*.jsonl") for line in path.read_text().splitlines())
    return [event for line in lines if "event" in (event := json.loads(line))]
