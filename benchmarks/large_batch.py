"""What does it take for a step of sixteen times the samples to learn as well as a small one?

scikit-learn's handwritten digits and the project's small convnet, the same number of epochs for everybody, so that the
large batch has a sixteenth of the steps. The small batch sets the mark, over several seeds. The large batch is trained
with the small one's rate, with that rate times sixteen from the first step, and by each of the rules: a scaled rate
with warm-up, LARS, LAMB. Batch norm sees the same 16 images at a time in every row. Last, one small-batch run measures
its gradient noise scale. The rates of the rows were found on seeds that are not used here.

    python benchmarks/large_batch.py                      about five minutes on one quiet core
    python benchmarks/large_batch.py --seeds 1 --epochs 1   whether it runs
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from results import Spread, conclude, say

SMALL, LARGE = 16, 256
EPOCHS = 15
FIRST_SEED = 10
MARGIN = 0.01
"""A large batch is as good as the small one where its mean accuracy is at most this much lower."""
RULES = ("linear", "sqrt", "lars", "lamb")


@dataclass(frozen=True, slots=True)
class Row:
    """One way of training; ``warmup`` is a fraction of all steps."""

    words: str
    batch: int
    optim: Mapping[str, Any]
    warmup: float = 0.0
    accuracies: list[float] = field(default_factory=list)


def rows() -> dict[str, Row]:
    tuned: dict[str, Any] = {"name": "sgd", "lr": 0.02, "weight_decay": 5e-4}
    by_rule = {**tuned, "base_batch": SMALL}
    return {
        "small": Row("small batch, lr 0.02", SMALL, tuned),
        "same": Row("large batch, same lr", LARGE, tuned),
        "cold": Row("linear scaling, no warm-up", LARGE, {**by_rule, "scaling": "linear"}),
        "linear": Row("linear scaling, warm-up", LARGE, {**by_rule, "scaling": "linear"}, 0.4),
        "sqrt": Row("root scaling, warm-up", LARGE, {**by_rule, "scaling": "sqrt"}, 0.2),
        "lars": Row("LARS, warm-up", LARGE, {"name": "lars", "lr": 0.32, "trust": 0.03, "weight_decay": 5e-4}, 0.3),
        "lamb": Row("LAMB, warm-up", LARGE, {"name": "lamb", "lr": 0.02, "weight_decay": 0.01}, 0.2),
    }


def main() -> None:
    from closeranks.core.system.environment import set_world
    from closeranks.core.world import World

    args = _arguments()
    set_world(World(launcher="testing"))  # tells nothing while it trains
    table = rows()
    for name in args.rows or table:
        row = table[name]
        row.accuracies.extend(train(row, seed, args.epochs)[0] for seed in _seeds(args.seeds))
        say(f"{row.words:28} {row.batch:4} samples a step  {_words(row.accuracies)}")
    scale = train(table["small"], FIRST_SEED, args.epochs, noise_every=5)[1]
    say(f"noise scale of the small batch's run: {'not told' if scale is None else f'about {scale:.2g} samples'}")
    figures = summarise(table, scale, args.epochs)
    goal = (
        f"with {LARGE // SMALL} times the samples a step, {', '.join(RULES)} with warm-up within {MARGIN:g} of the "
        "small batch's mean accuracy, and a linearly scaled rate without warm-up not"
    )
    conclude("large_batch", figures, goal, judge(figures))


def summarise(table: Mapping[str, Row], scale: float | None, epochs: float) -> dict[str, Any]:
    told = {
        name: {"batch": row.batch, "mean": round(mean(row.accuracies), 4), **Spread.of(row.accuracies).fields(4)}
        for name, row in table.items()
        if row.accuracies
    }
    return {"epochs": epochs, "accuracy": told, "noise_scale": None if scale is None else round(scale, 1)}


def judge(figures: Mapping[str, Any]) -> bool:
    """Whether every rule reaches the small batch, and the cold start does not."""
    means = {name: row["mean"] for name, row in figures["accuracy"].items()}
    if not {"small", "cold", *RULES} <= means.keys():
        return False
    reaches = {name: value >= means["small"] - MARGIN for name, value in means.items()}
    return all(reaches[name] for name in RULES) and not reaches["cold"]


def train(row: Row, seed: int, epochs: float, *, noise_every: int = 0) -> tuple[float, float | None]:
    """Accuracy on the held-out images, and the last noise scale that was measured."""
    from closeranks.core.events import NoiseSeen
    from closeranks.run.job.job import load_job
    from closeranks.run.loop import train_job
    from closeranks.telemetry.run_log.recorder import read_events

    job = load_job(None, extra=_tables(row, seed, epochs, noise_every)).value
    with tempfile.TemporaryDirectory(prefix="closeranks-large-batch-") as folder:
        result = train_job(job, Path(folder) / "run")
        told = (event for _, event in read_events(Path(folder) / "run" / "metrics" / "rank-00000.jsonl"))
        scales = [event.noise_scale for event in told if isinstance(event, NoiseSeen) and event.noise_scale]
    assert result.eval is not None
    return result.eval.metrics["accuracy"], scales[-1] if scales else None


def _tables(row: Row, seed: int, epochs: float, noise_every: int) -> dict[str, dict[str, Any]]:
    """A rate that is too high may give values that are not finite: such steps are skipped to the end."""
    portions = {"global_batch": row.batch, "micro_batch": SMALL // 2 if noise_every else SMALL}
    course = {"name": "cosine", "warmup": row.warmup, "min_ratio": 0.0}
    return {
        "run": {"seed": seed, "device": "cpu"},
        "model": {"name": "digits"},
        "data": {"name": "digits", "eval_fraction": 0.3},
        "train": {"epochs": epochs, **portions, "patience": 1_000_000, "noise_every": noise_every},
        "optim": {**row.optim, "clip": 0.0, "schedule": course},
        "checkpoint": {"save": False},
    }


def _words(accuracies: Sequence[float]) -> str:
    return f"accuracy {mean(accuracies):.4f} on average, {min(accuracies):.4f} to {max(accuracies):.4f}"


def _seeds(number: int) -> range:
    return range(FIRST_SEED, FIRST_SEED + number)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=4, help="runs of each row")
    parser.add_argument("--epochs", type=float, default=EPOCHS)
    parser.add_argument("--rows", nargs="+", choices=list(rows()), default=[], help="only these")
    return parser.parse_args()


if __name__ == "__main__":
    main()
