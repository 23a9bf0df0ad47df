"""Two starts in one folder, collectors beside savers, children left behind, clocks that jump."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator
from pathlib import Path

from tests.faults.agent_faults import ClockJump
from tests.faults.cases import FAKETIME, false_clock
from tests.hostile import checks
from tests.hostile.cases import STEPS, between, kind, one_of, seconds, step
from tests.hostile.checks import Problem
from tests.hostile.jobs import PACE
from tests.hostile.lab import Done, Run, kill

SCRIPT = """
import torch
from torch import nn
import closeranks

def loss(model, batch):
    return model(batch["x"]).square().mean()

closeranks.train(nn.Linear(4, 1), torch.randn(64, 4), loss, train={"steps": 3, "global_batch": 8},
                 run={"folder": "disk/run"}, checkpoint={"resume": "auto"})
"""
SECONDS = {
    "auto": ["checkpoint.resume=auto"],
    "named": ["checkpoint.resume=disk/run"],
    "another rate": ["checkpoint.resume=auto", "optim.lr=0.5"],
}


@kind("double starts", how=one_of(*SECONDS, "script", "numbered"), step=step(1), combines=False)
def second_start_beside_a_live_run(run: Run, how: str, step: int) -> Generator[None]:
    """Refused with status 2, the process that owns the folder and what to do; without resume it gets its own folder."""
    run.hold(step)
    yield
    with run.held(step):
        second = _start_beside(run, how)
    if how == "numbered":
        checks.check_code(second.code, {0}, second.said)
        return
    checks.check_words(second.out, second.err, second.code)
    checks.check_code(second.code, {2}, f"the second of two starts: {second.said}")
    if str(run.process.pid) not in second.said:
        raise Problem(f"the refusal does not name process {run.process.pid}: {second.err[-400:]}")


def _start_beside(run: Run, how: str) -> Done:
    if how == "script":
        path = run.lab.folder / "beside.py"
        path.write_text(SCRIPT)
        return run.lab.command("run", "-n", 2, path)
    # It must come to its end while the other one is held, so it holds nothing itself.
    return run.lab.train(*SECONDS.get(how, ["train.steps=2"]), "run.hooks=[]")


@kind("double starts", step=step(1), after_s=seconds(1.0), combines=False)
def second_start_while_the_first_drains(run: Run, step: int, after_s: float) -> Generator[None]:
    """Refused, or begun when the first has left: never both at once."""
    run.allowed |= {128 + signal.SIGTERM}
    run.hold(step)
    yield
    with run.held(step):
        kill(run.process.pid, signal.SIGTERM)
    time.sleep(after_s)
    second = run.lab.train("checkpoint.resume=auto")
    checks.check_words(second.out, second.err, second.code)
    checks.check_code(second.code, {0, 2}, f"the second of two starts: {second.said}")


@kind("double starts", step=step(1), after_s=seconds(0.5), combines=False)
def second_start_after_a_killed_run(run: Run, step: int, after_s: float) -> Generator[None]:
    """A lock dies with its owner: the next start is not refused."""
    run.allowed |= {-signal.SIGKILL}
    run.hold(step)
    yield
    with run.held(step):
        kill(run.process.pid)
    run.process.wait()
    time.sleep(after_s)
    second = run.lab.train("checkpoint.resume=auto")
    checks.check_words(second.out, second.err, second.code)
    checks.check_code(second.code, {0}, f"the start after a kill: {second.said}")


@kind("collectors", keep=between(2, 3), every=one_of(1, 2, 3), step=step(4))
def prune_beside_a_save(run: Run, keep: int, every: int, step: int) -> Generator[None]:
    run.settings.append(f"checkpoint.every={every}")
    run.environment[PACE] = "0.06"
    yield
    run.reach(step)
    while run.process.poll() is None:
        done = run.lab.command("ckpt", "prune", run.folder, "--keep-last", keep)
        checks.check_words(done.out, done.err, done.code)
        checks.check_code(done.code, {0, 2}, done.said)
    yield
    done = run.lab.command("ckpt", "verify", run.folder)
    checks.check_code(done.code, {0}, f"verify after prunes: {done.said}")


@kind(
    "children",
    combines=False,
    how=one_of("plain", "bare", "open"),
    rank=between(0, 1),
    step=step(1),
    faults=one_of("", "kill"),
)
def child_in_a_session_of_its_own(run: Run, how: str, rank: int, step: int, faults: str) -> Generator[None]:
    """It outlives the worker that started it, holds none of the run's memory, and is named and ended with the run."""
    run.order(f"child-{rank}-{step}-{how}")
    run.faults += [f"kill(rank={rank}, step={min(STEPS, step + 3)})"] if faults else []
    run.hold(step + 2)
    yield
    with run.held(step + 2):
        pid = int((run.lab.orders / "child-pid").read_text())
        held = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").glob("*")]
    if taken := [link for link in held if "memfd" in link or link.startswith("/dev/shm")]:
        raise Problem(f"a child of user code holds the run's memory: {taken}")
    yield
    if run.process.returncode == 0 and str(pid) not in run.said:
        raise Problem(f"process {pid}, which user code left running, is not named: {run.said[-300:]}")


@kind(
    "clocks",
    needs=lambda: "" if FAKETIME else "faketime is not installed",
    first=one_of("+365d", "-365d", "+1h", "-1h", "+50y"),
    then=one_of("+0", "-10y", "+3650d"),
    step=step(1, 12),
)
def clock_that_jumps(run: Run, first: str, then: str, step: int) -> Generator[None]:
    run.environment |= false_clock(run.lab.folder)
    clock = str(run.lab.folder / "clock")
    run.agent_faults += [ClockJump(clock, first, step), ClockJump(clock, then, step + 8)]
    yield
