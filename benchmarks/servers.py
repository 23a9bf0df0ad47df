"""Do parameter servers compute what an all-reduce does, keep their bound, and survive their own death?

Three questions, on processes of this machine:

    equal   four workers and two servers in synchronous mode against four workers that all-reduce, in float64
    bound   stale-synchronous with bounds 0, 1 and 4, and asynchronous, under random delays of every worker: the rate
            of steps, the loss, and how far ahead of the slowest a worker was, by the clock of the machine alone
    kills   a server is killed with SIGKILL in the middle of twenty steps; the run ends in the same bits as one that
            was left alone, and how long until the next step was finished, beside as many ranks that all-reduce

    python benchmarks/servers.py                   about eight minutes
    python benchmarks/servers.py --only bound --steps 24
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from results import Spread, begin, conclude, say

from closeranks import Hook, Session
from closeranks.core.events import StepDone
from closeranks.run.job.job import load_job
from closeranks.testing import run_world

NUM_WORKERS, NUM_SERVERS = 4, 2
MEAN_DELAY_S = 0.2
_JOB = Path(__file__).parents[1] / "examples" / "tiny.toml"
_MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"mode": "sync"},
    "bound 0": {"mode": "stale", "bound": 0},
    "bound 1": {"mode": "stale", "bound": 1},
    "bound 4": {"mode": "stale", "bound": 4},
    "asynchronous": {"mode": "async"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("equal", "bound", "kills"), help="one of the questions")
    parser.add_argument("--steps", type=int, default=96, help="of each run with delays")
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    met = True
    with tempfile.TemporaryDirectory(prefix="closeranks-servers-") as folder:
        if args.only in (None, "equal"):
            figures["largest_difference"] = equal(Path(folder))
            met &= figures["largest_difference"] <= 1e-9
        if args.only in (None, "bound"):
            figures["delays"] = {name: bounded(Path(folder, name), name, args.steps) for name in _MODES}
            met &= all(one["furthest_ahead"] <= one["bound"] for one in figures["delays"].values() if "bound" in one)
        if args.only in (None, "kills"):
            figures["kills"] = killed(Path(folder), args.kills)
            met &= figures["kills"]["is_bit_equal"] and figures["kills"]["num_recovered"] == args.kills
    goal = "synchronous equals all-reduce to 1e-9, no bound is exceeded, killed servers change no bit"
    conclude("servers", figures, goal, met)


def equal(folder: Path) -> float:
    """The largest relative difference between the losses of two runs."""
    settings = ["train.precision=float64", "train.steps=20"]
    plain = losses(train(folder / "plain", NUM_WORKERS, settings))
    count = f"sync.server.count={NUM_SERVERS}"
    served = losses(train(folder / "served", NUM_WORKERS + NUM_SERVERS, [*settings, count]))
    found = max(abs(served[step] - loss) / loss for step, loss in plain.items())
    say(f"largest relative difference of a loss in {len(plain)} steps: {found:.1e}")
    return found


class Recorder(Hook):
    """Delays each worker's steps at random, and notes when they began and when backward did, before anything of the
    step was sent."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.pushing: list[float] = []
        self.done: list[StepDone] = []

    def on_step(self, session: Session, step: StepDone) -> None:
        self.done.append(step)

    def drive(self, session: Session) -> None:
        begin_backward, draw = session.engine.reducer.begin_backward, random.Random(session.world.rank)

        def noted(*words: int, is_last: bool) -> None:
            if is_last:
                self.pushing.append(time.monotonic())
            begin_backward(*words, is_last=is_last)

        session.engine.reducer.begin_backward = noted  # type: ignore[method-assign]
        for step in session:
            self.began.append(time.monotonic())
            if session.world.rank < NUM_WORKERS:
                time.sleep(draw.expovariate(1 / MEAN_DELAY_S))
            step.run()


def delayed(folder: Path, server: dict[str, Any], steps: int) -> tuple[list[float], list[float], list[Any], float]:
    """One rank of a run: when its steps and their pushes began, losses and stalenesses, and the last evaluation."""
    tables = {"sync": {"server": {"count": NUM_SERVERS, "every": steps // 3, **server}}}
    tables["train"] = {"steps": steps, "eval_every": steps, "global_batch": 8, "micro_batch": 2}
    tables["checkpoint"] = {"save": False}
    job = load_job(_JOB, extra=tables).value
    recorder = Recorder()
    session = Session.from_job(job, folder, [recorder])
    recorder.drive(session)
    evaluated = session.result.eval
    rows = [(done.loss, done.staleness) for done in recorder.done]
    return recorder.began, recorder.pushing, rows, evaluated.loss if evaluated else float("nan")


def bounded(folder: Path, name: str, steps: int) -> dict[str, Any]:
    ranks = run_world(delayed, NUM_WORKERS + NUM_SERVERS, folder, _MODES[name], steps, timeout_s=600)
    workers = [(began, pushing) for began, pushing, _, _ in ranks[:NUM_WORKERS]]
    began, _, rows, eval_loss = ranks[0]
    figures: dict[str, Any] = {
        "steps_per_s": round((steps - 1) / (max(one[1][-1] for one in workers) - began[1]), 2),
        "staleness": round(mean(staleness for _, staleness in rows), 2),
        "eval_loss": round(eval_loss, 4),
        "furthest_ahead": max(ahead(workers)),
    }
    if "async" not in name:
        figures["bound"] = _MODES[name].get("bound", 0)
    say(f"{name:<14} {json.dumps(figures)}")
    return figures


def ahead(workers: Sequence[tuple[list[float], list[float]]]) -> Iterator[int]:
    """At the beginning of each worker's steps: how many steps the slowest of the others was behind."""
    for number, (began, _) in enumerate(workers):
        others = [pushing for other, (_, pushing) in enumerate(workers) if other != number]
        for step, at in enumerate(began):
            yield step - min(sum(time <= at for time in pushing) for pushing in others)


def killed(folder: Path, num_kills: int) -> dict[str, Any]:
    size = NUM_WORKERS + NUM_SERVERS
    plain = [f"train.steps={3 * num_kills + 6}", "elastic.snapshot_every=1", "run.deterministic=true"]
    served = [*plain, f"sync.server.count={NUM_SERVERS}"]
    calm = train(folder / "calm", size, served)
    struck, seconds = recoveries(folder / "struck", served, [NUM_WORKERS + n % NUM_SERVERS for n in range(num_kills)])
    _, without = recoveries(folder / "without", plain, [n % size for n in range(num_kills)])
    same = [path.name for path in sorted((calm / "checkpoints").glob("step-*"))][-1]
    command = [
        sys.executable,
        "-m",
        "closeranks",
        "ckpt",
        "diff",
        *(str(run / "checkpoints" / same) for run in (calm, struck)),
    ]
    is_equal = subprocess.run(command, capture_output=True).returncode == 0 and losses(calm) == losses(struck)
    spread, control = Spread.of(seconds), Spread.of(without)
    say(f"{len(seconds)} of {num_kills} kills recovered, the next step finished after {spread.words(2)} s")
    say(f"as many ranks that all-reduce: {control.words(2)} s")
    return {
        "num_recovered": len(seconds),
        "is_bit_equal": is_equal,
        "seconds": spread.fields(2),
        "seconds_without_servers": control.fields(2),
    }


def recoveries(folder: Path, settings: Sequence[str], ranks: Sequence[int]) -> tuple[Path, list[float]]:
    """A run in which these ranks are killed, one every third step: seconds until the next step was finished."""
    kills = [f"kill(rank={rank}, step={3 * n + 3}, at={0.1 * (n % 8) + 0.1:.1f})" for n, rank in enumerate(ranks)]
    limits = ["elastic.max_faults=1000", "elastic.max_host_faults=1000"]
    train(folder, NUM_WORKERS + NUM_SERVERS, [*settings, *limits, "--faults", ", ".join(kills)])
    events = lines_of(folder / "metrics" / "agent.jsonl")
    return folder, [line["seconds"] for line in events if line["event"] == "ranks_closed"]


def train(folder: Path, size: int, settings: Sequence[str]) -> Path:
    words = ["train", str(_JOB), "-n", str(size), f"run.folder={folder}", *settings]
    command = [sys.executable, "-m", "closeranks", *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return folder


def losses(run: Path) -> dict[int, float]:
    """By step; of a step that was done twice, the last."""
    lines = lines_of(run / "metrics" / "rank-00000.jsonl")
    return {line["step"]: line["loss"] for line in lines if line["event"] == "step"}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    begin(main)
