"""What does one slow worker cost, in step and apart?

Four workers of this machine on equal shares of a processor, by control groups; then one of them at a third of its
share. The same job in step (gradients are summed in every step), apart (DiLoCo, meeting every eight steps), and apart
with micro-batches shared out by speed (``sync.local.balance``). Told: the step rate, what of it the slow worker costs
against the same setting without one, and the loss of the last evaluation beside.

    python benchmarks/straggler.py                    three settings, with and without, about eight minutes; wants root
    python benchmarks/straggler.py --steps 24
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from results import conclude, say

NUM_WORKERS = 4
SHARE = 0.3
"""Of one processor, for each worker; all together less than this machine has."""
SLOW = SHARE / 3
SETTINGS = {
    "in step": (),
    "apart": ("sync.local.every=8",),
    "apart, balanced": ("sync.local.every=8", "sync.local.balance=true"),
}
_JOB = Path(__file__).with_name("straggler.toml")
_SKIPPED = 16
"""Steps before workers are told apart and shares have settled."""


@dataclass(frozen=True, slots=True)
class Ran:
    steps_per_s: float
    final_loss: float
    eval_loss: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=48, help="of each run")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="closeranks-straggler-") as folder:
        for name, settings in SETTINGS.items():
            even, slow = (
                train(Path(folder, f"{name}-{share}"), settings, share, args.steps) for share in (SHARE, SLOW)
            )
            figures[name] = {
                "steps_per_s": round(even.steps_per_s, 3),
                "with_a_slow_one": round(slow.steps_per_s, 3),
                "lost": round(1 - slow.steps_per_s / even.steps_per_s, 3),
                "eval_loss": round(even.eval_loss, 4),
                "eval_loss_with_a_slow_one": round(slow.eval_loss, 4),
            }
            say(f"{name:<16} {json.dumps(figures[name])}")
    met = figures["apart, balanced"]["lost"] <= 0.5 * figures["in step"]["lost"]
    goal = "apart and balanced, a slow worker costs at most half of what it costs in step"
    conclude("straggler", figures, goal, met)


def train(folder: Path, settings: tuple[str, ...], last_share: float, steps: int) -> Ran:
    """One run; every worker has its share from its first step to the last, the last one its own."""
    shares = [SHARE] * (NUM_WORKERS - 1) + [last_share]
    faults = ", ".join(f"slow(rank={r}, step=1, steps={steps}, share={share:.3f})" for r, share in enumerate(shares))
    words = ["train", str(_JOB), "-n", str(NUM_WORKERS), f"run.folder={folder}", f"train.steps={steps}", *settings]
    command = [sys.executable, "-m", "closeranks", *words, "--faults", faults]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "metrics" / "rank-00000.jsonl").read_text().splitlines()]
    taken = [line for line in lines if line["event"] == "step"]
    evals = [line["loss"] for line in lines if line["event"] == "eval"]
    # Steps of a round are told together, each with its own time: the middle of rounds, not of steps.
    rounds = [mean(line["seconds"] for line in taken[at : at + 8]) for at in range(_SKIPPED, len(taken) - 7, 8)]
    return Ran(1 / median(rounds), mean(line["loss"] for line in taken[-8:]), evals[-1])


if __name__ == "__main__":
    main()
