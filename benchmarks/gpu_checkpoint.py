"""What does a checkpoint cost a large model on one GPU?

A Llama of a billion parameters trains in bf16, compiled block by block, as a job of the command line does, and saves a
few times while it goes on. Told are, for each save, how much longer its next three steps took than three undisturbed
ones, and how long it took until the checkpoint counted (written, read back, committed) in the background.

    PYTHONPATH=src python benchmarks/gpu_checkpoint.py                    about two minutes on one H200
    PYTHONPATH=src python benchmarks/gpu_checkpoint.py --device cpu --quick
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from results import conclude, say

GOAL_STEPS = 2.0
"""The delay of one save, in steps."""
_SKIPPED = 20
"""Steps before anything is counted: compiling, and the device's clock."""


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="closeranks-gpu-checkpoint-", dir=args.folder) as folder:
        events = train(args, Path(folder) / "run")
    figures = figures_of(events, args.every)
    say(json.dumps(figures, indent=2))
    goal = f"a save delays training by no more than {GOAL_STEPS:g} steps"
    met = figures["num_saves"] > 0 and figures["delay_steps"] <= GOAL_STEPS and args.device == "cuda"
    conclude("gpu_checkpoint", figures, goal, met)


def train(args: argparse.Namespace, run: Path) -> list[dict[str, Any]]:
    size = ["model.preset=tiny"] if args.quick else ["model.preset=1b", "model.vocab_size=32000"]
    settings = [
        *size,
        f"data.seq_len={32 if args.quick else args.seq_len}",
        f"train.global_batch={args.batch}",
        f"train.steps={args.every * args.saves + args.every // 2}",
        "train.precision=float32" if args.device == "cpu" else "train.precision=bf16",
        f"train.compile={'true' if args.device == 'cuda' else 'false'}",
        f"checkpoint.every={args.every}",
        "checkpoint.keep_last=2",
        "data.eval_fraction=0.0",
        f"run.device={args.device}",
        f"run.folder={run}",
    ]
    job = run.with_suffix(".toml")
    job.write_text('[model]\nname = "llama"\n')
    command = [sys.executable, "-m", "closeranks", "train", str(job), "-n", "1", *settings]
    say(" ".join(command))
    subprocess.run(command, check=True)
    lines = (run / "metrics" / "rank-00000.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def figures_of(events: list[dict[str, Any]], every: int) -> dict[str, Any]:
    """The last save follows the end of training and delays nothing: only those beside it count."""
    seconds = {event["step"]: event["seconds"] for event in events if event["event"] == "step"}
    saves = [event for event in events if event["event"] == "saved" and event["step"] + 3 in seconds]
    near = {event["step"] + number for event in saves for number in range(1, 4)}
    undisturbed = median(taken for step, taken in seconds.items() if step > _SKIPPED and step not in near)
    delays = [sum(seconds[event["step"] + n] for n in range(1, 4)) - 3 * undisturbed for event in saves]
    return {
        "num_saves": len(saves),
        "step_s": round(undisturbed, 4),
        "state_gb": round(max((event["bytes"] for event in saves), default=0) / 1e9, 2),
        "delay_s": [round(delay, 4) for delay in delays],
        "delay_steps": round(max(delays, default=0.0) / undisturbed, 2),
        "durable_after_s": [round(event["seconds"], 2) for event in saves],
        "every": every,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--every", type=int, default=150, help="steps between saves")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where the run and its checkpoints lie; default: the temporary")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see whether everything runs")
    args = parser.parse_args()
    if args.quick:
        args.every, args.saves, args.batch = 30, 2, 2
    return args


if __name__ == "__main__":
    main()
