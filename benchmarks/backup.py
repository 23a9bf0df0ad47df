"""Backup workers: is every sample taken exactly once, and what does a step cost while one worker is slow?

Two questions, on processes of this machine, with four workers and one server:

    samples    workers and servers are killed with SIGKILL in the middle of steps, then the run is drained and goes on
               with three workers, then with five: every micro-batch must be taken by exactly one step
    straggler  at any time one worker, drawn at random every two seconds, waits a while in each forward: seconds per
               step and the loss on held-out data, plain synchronous and with one backup worker, in alternation

    python benchmarks/backup.py                    about six minutes
    python benchmarks/backup.py --only samples
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from results import Spread, begin, conclude, say

from closeranks import Hook, Session
from closeranks.core.events import StepDone
from closeranks.run.job.job import load_job
from closeranks.telemetry.run_log.sample_log import read_samples
from closeranks.testing import run_world

NUM_WORKERS = 4
PERIOD_S, DELAY_S = 2.0, 0.25
"""How long a worker stays slow, and how much longer each of its micro-batches takes."""
MOST_TIME, MOST_LOSS = 0.75, 1.03
"""The goal: of the time of a step, and of the loss, of plain synchronous training."""
_JOB = Path(__file__).parents[1] / "examples" / "tiny.toml"
_SEQ_LEN, _BATCH, _MICRO = 64, 24, 2
_COMMON = (f"train.global_batch={_BATCH}", f"train.micro_batch={_MICRO}", "sync.server.count=1", "run.device=cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("samples", "straggler"), help="one of the questions")
    parser.add_argument("--steps", type=int, default=64, help="of each run with a straggler")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    met = True
    with tempfile.TemporaryDirectory(prefix="closeranks-backup-") as folder:
        if args.only in (None, "samples"):
            figures["samples"] = counted(Path(folder, "samples"))
            met &= figures["samples"]["missing"] == figures["samples"]["repeated"] == 0
        if args.only in (None, "straggler"):
            found = figures["straggler"] = straggled(Path(folder), args.steps, args.rounds)
            met &= found["time"] <= MOST_TIME and found["loss"] <= MOST_LOSS
    goal = "no sample is lost or taken twice; with one slow worker a step takes at most "
    goal += f"{MOST_TIME} of the synchronous time, and the loss is at most {MOST_LOSS} times as high"
    conclude("backup", figures, goal, met)


# Samples


def counted(folder: Path, steps: int = 40) -> dict[str, Any]:
    kills = [f"kill(rank={rank}, step={step}, at=0.5)" for rank, step in ((0, 4), (4, 9))]
    began = time.monotonic()
    train(folder, 5, steps, ["--faults", ", ".join(kills)], drain_at=14)
    train(folder, 4, steps, ["checkpoint.resume=auto"], drain_at=26)
    train(folder, 6, steps, ["checkpoint.resume=auto"])
    log, steps_done = read_samples(folder), done_in(folder)
    taken = Counter((one.of_step, one.micro_batch) for each in log.steps.values() for one in each)
    planned = {(step + 1, index) for step in range(steps) for index in range(_BATCH // _MICRO)}
    weights = {step: _SEQ_LEN * len(log.samples_of(step)) for step in steps_done}
    figures = {
        "steps": len(steps_done),
        "missing": len(planned - taken.keys()),
        "repeated": sum(step["weight"] != weights[number] for number, step in steps_done.items()),
        "late": sum(one.step != one.of_step for each in log.steps.values() for one in each),
        "kills": sum(line["event"] == "ranks_closed" for line in lines_of(folder / "metrics" / "agent.jsonl")),
        "seconds": round(time.monotonic() - began, 1),
    }
    say(f"samples: {json.dumps(figures)}")
    return figures


def train(folder: Path, size: int, steps: int, words: Sequence[str], *, drain_at: int = 0) -> None:
    """``drain_at``: the run is asked to stop once it has reported this step."""
    settings = [*_COMMON, "sync.server.backup=1", "sync.server.every=4", f"train.steps={steps}"]
    settings += ["data.log_samples=true", "train.eval_every=0", "elastic.snapshot_every=1", f"run.folder={folder}"]
    settings += ["elastic.max_faults=1000", "elastic.max_host_faults=1000"]
    command = [sys.executable, "-m", "closeranks", "train", str(_JOB), "-n", str(size), *settings, *words]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while drain_at and process.poll() is None and max(done_in(folder), default=0) < drain_at:
        time.sleep(0.05)
    if drain_at and process.poll() is None:
        process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    if process.returncode not in ((0, 143) if drain_at else (0,)):
        raise SystemExit(f"{' '.join(command)}\n{said[-2000:]}")


def done_in(folder: Path) -> dict[int, dict[str, Any]]:
    """Steps; of one that was done twice, the last."""
    return {line["step"]: line for line in lines_of(folder / "metrics" / "rank-00000.jsonl") if line["event"] == "step"}


def lines_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    *whole, _ = path.read_text().split("\n")
    return [json.loads(line) for line in whole]


# Straggler


class Straggler(Hook):
    """One worker at a time waits in every forward."""

    def __init__(self) -> None:
        self.done: list[StepDone] = []

    def on_start(self, session: Session) -> None:
        rank = session.world.rank
        session.model.register_forward_pre_hook(lambda module, _: self._wait(rank) if module.training else None)

    def _wait(self, rank: int) -> None:
        if random.Random(int(time.monotonic() / PERIOD_S)).randrange(NUM_WORKERS) == rank:
            time.sleep(DELAY_S)

    def on_step(self, session: Session, step: StepDone) -> None:
        self.done.append(step)


def slowed(folder: Path, backup: int, steps: int) -> tuple[float, float, int]:
    """One rank: seconds per step after the first interval, the loss on held-out data, and pushes dropped."""
    settings = [*_COMMON, f"sync.server.backup={backup}", "sync.server.every=16", f"train.steps={steps}"]
    settings += [f"train.eval_every={steps}", "checkpoint.save=false"]
    straggler = Straggler()
    session = Session.from_job(load_job(_JOB, settings).value, folder, [straggler])
    for step in session:
        step.run()
    evaluated = session.result.eval
    seconds = mean(done.seconds for done in straggler.done[16:])
    return seconds, evaluated.loss if evaluated else float("nan"), sum(len(done.dropped) for done in straggler.done)


def straggled(folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    found: dict[int, list[tuple[float, float, int]]] = {0: [], 1: []}
    for number in range(rounds):
        for backup, runs in found.items():
            place = folder / f"{number}-{backup}"
            runs.append(run_world(slowed, NUM_WORKERS + 1, place, backup, steps, timeout_s=600)[0])
            seconds, loss, dropped = runs[-1]
            say(
                f"backup = {backup}: {seconds:.3f} s a step, loss {loss:.4f}, {dropped} pushes dropped in {steps} steps"
            )
    plain, backup = ([Spread.of(values) for values in list(zip(*runs, strict=True))[:2]] for runs in found.values())
    return {
        "synchronous": {"step_s": plain[0].fields(3), "eval_loss": plain[1].fields(4)},
        "backup": {"step_s": backup[0].fields(3), "eval_loss": backup[1].fields(4)},
        "time": round(backup[0].median / plain[0].median, 3),
        "loss": round(backup[1].median / plain[1].median, 4),
    }


if __name__ == "__main__":
    begin(main)
