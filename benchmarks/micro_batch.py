"""How much faster does a model of images train with the default micro-batch than with an eighth of the global batch?

The project's small convnet on scikit-learn's digits, on one process and one thread, in turns: ``train.micro_batch``
left out, and set to an eighth. The figure is the ratio of samples per second, from the middle of each run's step times.

    python benchmarks/micro_batch.py                             about two minutes on one quiet core
    python benchmarks/micro_batch.py --rounds 1 --steps 10       whether it runs
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from results import Spread, begin, conclude, say

BATCHES = (16, 32, 64)
EIGHTH = 8
GOAL = 1.3
"""At the batch sizes where the default is not an eighth."""


def main() -> None:
    import torch

    from closeranks.core.system.environment import set_world
    from closeranks.core.world import World

    args = _arguments()
    torch.set_num_threads(1)
    set_world(World(launcher="testing"))  # tells nothing while it trains
    figures = {}
    for batch in BATCHES:
        own = step_seconds(batch, None, 1)[0]
        ratios = [_ratio(batch, args.steps) for _ in range(args.rounds)]
        figures[f"batch_{batch}"] = {"default": own, "eighth": batch // EIGHTH, **Spread.of(ratios).fields(2)}
        faster = f"{Spread.of(ratios).words(2)} times as fast"
        say(f"global batch {batch}: {own} samples instead of {batch // EIGHTH} are {faster}")
    goal = f"at least {GOAL} times the samples per second of an eighth, at every batch size"
    conclude("micro_batch", figures, goal, all(one["median"] >= GOAL for one in figures.values()))


def _ratio(batch: int, num_steps: int) -> float:
    return step_seconds(batch, batch // EIGHTH, num_steps)[1] / step_seconds(batch, None, num_steps)[1]


def step_seconds(batch: int, micro_batch: int | None, num_steps: int) -> tuple[int, float]:
    """Samples of a micro-batch, and the middle of what a step took, the first left out where there are others."""
    from closeranks.core.events import StepDone
    from closeranks.run.job.job import load_job, micro_batch_size
    from closeranks.run.loop import train_job
    from closeranks.telemetry.run_log.recorder import read_events

    train = {"steps": num_steps, "global_batch": batch, **({"micro_batch": micro_batch} if micro_batch else {})}
    tables = {
        "run": {"device": "cpu"},
        "model": {"name": "digits"},
        "data": {"name": "digits"},
        "train": train,
        "checkpoint": {"save": False},
        "telemetry": {"report": False},
    }
    job = load_job(None, extra=tables).value
    with tempfile.TemporaryDirectory(prefix="closeranks-micro-batch-") as folder:
        train_job(job, Path(folder) / "run")
        events = (event for _, event in read_events(Path(folder) / "run" / "metrics" / "rank-00000.jsonl"))
        seconds = [event.seconds for event in events if isinstance(event, StepDone)]
    return micro_batch_size(job), median(seconds[1:] or seconds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args()


if __name__ == "__main__":
    begin(main)
