"""Run the job, struck or not, as a person does; look at what it left behind, and hold it against the run that never
failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from closeranks.checkpoint.load.catalogue import FoundCheckpoint
from closeranks.core.events import Event, RankLost, RanksClosed
from closeranks.elastic.faults.disk import mount_problem
from closeranks.lab.drills.recorded_run import RecordedRun, read_recorded_run, state_difference
from closeranks.run.state.checkpoint_lookup import pick_checkpoint
from closeranks.telemetry.live.status import read_status
from closeranks.telemetry.run_log.sample_log import SampleLog, read_samples
from tests.cli.commands import IMPORTABLE
from tests.faults.agent_faults import AgentFault, encode
from tests.faults.jobs import SHAPES, STEPS, write_job
from tests.faults.machine import Machine

TIMEOUT_S = 140.0


@dataclass(frozen=True)
class Ran:
    """A run that is over."""

    folder: Path
    """With the job, and the run in ``run``."""
    code: int
    out: str = ""
    err: str = ""
    left: tuple[str, ...] = ()
    """Whatever is still there that was not before."""
    ports: frozenset[str] = frozenset()
    """Sockets that its processes listened on, by inode."""

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @cached_property
    def course(self) -> RecordedRun:
        return read_recorded_run(self.run)

    @cached_property
    def samples(self) -> SampleLog:
        return read_samples(self.run)

    @cached_property
    def state(self) -> tuple[FoundCheckpoint, Any]:
        return pick_checkpoint(str(self.run))

    def told(self, kind: type[Event]) -> list[Any]:
        return [line.event for line in self.course.events if isinstance(line.event, kind)]

    @property
    def lost(self) -> list[RankLost]:
        return self.told(RankLost)

    @property
    def closed(self) -> list[RanksClosed]:
        return self.told(RanksClosed)

    @property
    def strikes(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.folder / "strikes.json").read_text())
        return told

    @property
    def said(self) -> str:
        return f"exit {self.code}\n{self.out}\n{self.err}"


def go(
    folder: Path,
    shape: str = "ddp",
    *settings: str,
    faults: str = "",
    agent_faults: Sequence[AgentFault] = (),
    env: dict[str, str] | None = None,
    meanwhile: Callable[[subprocess.Popen[str], Path], None] | None = None,
) -> Ran:
    """Train the job in ``folder`` to its end. ``meanwhile`` is called with the agent's process and the run's folder."""
    job, how = write_job(folder), SHAPES[shape]
    (folder / "orders").mkdir(exist_ok=True)
    words = [job, how.num_workers, faults, encode(agent_faults), f"layout={how.layout}", *how.settings, *settings]
    machine = Machine()
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            [*_apart(folder), sys.executable, "-m", "tests.faults.drive", *map(str, words)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **IMPORTABLE, machine.mark: "1", **(env or {})},
            stdout=out,
            stderr=err,
            text=True,
            start_new_session=True,
        )
        machine.pid = process.pid
        with machine.watched():
            try:
                if meanwhile is not None:
                    meanwhile(process, folder / "run")
                code = process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                stands = _where_it_stands(folder)
                raise AssertionError(f"it has not ended after {TIMEOUT_S:g} s:\n{stands}") from None
            finally:
                process.kill()
                process.wait()
    said, complained = (folder / "out").read_text(), (folder / "err").read_text()
    return Ran(folder, code, said, complained, machine.left(folder), frozenset(machine.ports))


def _where_it_stands(folder: Path) -> str:
    """What was said so far, and where every thread of every worker is: they write that into their logs."""
    status = read_status(folder / "run")
    for pid in [worker.pid for worker in status.workers if worker.pid] if status else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(1.0)
    logs = [f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted((folder / "run" / "logs").glob("*"))]
    return "\n".join([(folder / "out").read_text(), (folder / "err").read_text(), *logs])


def _apart(folder: Path) -> list[str]:
    """Give a command a /dev/shm of its own, so that what is left there is known to be its own; for root alone."""
    shm = folder / "shm"
    shm.mkdir(exist_ok=True)
    if mount_problem():
        return []
    return ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(shm)]


# --- the proof


def assert_clean(ran: Ran) -> None:
    assert ran.left == (), ran.left


def assert_same(calm: Ran, struck: Ran, last: int = STEPS) -> None:
    """Every loss, the last state and every sample are those of the run that never failed, and nothing is left."""
    assert struck.code == 0, struck.said
    assert_clean(struck)
    assert bits(struck) == bits(calm)
    assert len(bits(calm)) == last
    assert state_difference(calm.run, struck.run) == ""
    assert struck.samples.conflicts == ()
    assert struck.samples.steps == calm.samples.steps
    taken = [sample for step in range(1, last + 1) for sample in struck.samples.samples_of(step)]
    assert len(taken) == len(set(taken)) == 16 * last


def assert_struck(ran: Ran, *kinds: str, num_redone: int = 1) -> None:
    """Every strike fell, and the agent told of exactly these ends of generations, in this order."""
    assert ran.strikes["missed"] == [], ran.said
    assert [strike for strike in ran.strikes["struck"] if strike["error"]] == []
    told = [lost.kind for lost in ran.lost]
    # The kernel counts its out-of-memory kills for the host: one of another test makes a kill look like one.
    told = ["killed" if (found, kind) == ("oom", "killed") else found for found, kind in zip(told, kinds, strict=False)]
    assert [*told, *(lost.kind for lost in ran.lost[len(kinds) :])] == list(kinds), ran.said
    assert all(closed.num_redone <= num_redone for closed in ran.closed), ran.closed


def bits(ran: Ran) -> dict[int, str]:
    """The loss of every step, in every bit; what was done again replaces what stood there."""
    return {step: loss.hex() for step, loss in ran.course.losses.items()}


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Until rank 0 has written down that step."""
    path = run / "metrics" / "rank-00000.jsonl"
    needle = f'"step": {step},'
    deadline = time.monotonic() + TIMEOUT_S
    while not (path.exists() and any('"step"' in line and needle in line for line in path.read_text().splitlines())):
        assert process.poll() is None, "it ended before"
        assert time.monotonic() < deadline
        time.sleep(0.01)
