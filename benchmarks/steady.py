"""What does surviving faults cost while nothing goes wrong?

The same job on two workers of this machine, with everything that a recovery needs (the agent watches, the state is
copied to memory) and with ``elastic.enabled = false``; and, published beside, started by torchrun without any agent.
The lanes take turns, each a fresh run of some steps of 150 ms or more; the ratio of step rates is taken within a round.
Told as well: how often a copy is taken, and what memory it needs.

    python benchmarks/steady.py                       two rows of eight rounds, about ten minutes
    python benchmarks/steady.py --rounds 2 --rows ddp
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from elastic_runs import LaneFailed, Launched, Ours, lines_of
from results import Spread, conclude, say

NUM_RANKS = 2
GOAL = 0.97
TARGET_MS = 150.0
ROWS = {"ddp": "layout.zero=0", "zero3": "layout.zero=3"}
LANES = ("on", "off", "torchrun")
_SKIPPED = 5
"""Steps that are not counted: the first is slow, and how often to copy is decided after the third."""
_MODEL = ("model.preset=small", "data.seq_len=128", "train.micro_batch=4")


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of a lane."""

    step_s: float
    """The median of its steps."""
    memory_bytes: int
    """Of rank 0 at the end, the snapshot slots not counted."""
    snapshots: Mapping[str, Any] | None
    """What the last ``snapshots`` event says; None where no copies are taken."""


def main() -> None:
    args = _arguments()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="closeranks-steady-") as folder:
        for row in args.rows:
            figures[row] = measure(Path(folder, row), ROWS[row], args)
            say(f"  {row:<6} {figures[row]['words']}")
    goal = f"a step of {TARGET_MS:g} ms or more: step rate with recovery on at least {GOAL} of that with it off"
    conclude("steady", figures, goal, judge(figures, args.rows))


def measure(folder: Path, layout: str, args: argparse.Namespace) -> dict[str, Any]:
    batch = args.batch or choose_batch(take_turn("off", folder / "first", layout, 8, 10).step_s, 8)
    turns: dict[str, list[Turn]] = {lane: [] for lane in LANES}
    for number in range(args.rounds):
        for lane in LANES[number % 3 :] + LANES[: number % 3]:
            turns[lane].append(take_turn(lane, folder / f"{lane}-{number}", layout, batch, args.steps))
            say(f"    {lane:<8} {1000 * turns[lane][-1].step_s:.1f} ms a step")
    return compare(turns, batch)


def choose_batch(step_s: float, batch: int) -> int:
    """Samples for a step that is safely long enough, when ``batch`` of them take so long: whole micro-batches."""
    unit = NUM_RANKS * 4
    return unit * max(1, math.ceil(1.25 * TARGET_MS / 1000 / step_s * batch / unit))


def take_turn(lane: str, folder: Path, layout: str, batch: int, num_steps: int) -> Turn:
    overrides = [*_MODEL, layout, f"train.global_batch={batch}", f"train.steps={num_steps + _SKIPPED}"]
    run = folder / "run"
    if lane == "torchrun":
        options = ["--standalone", "--nproc-per-node", str(NUM_RANKS), "-m", "closeranks", "train"]
        quiet = ["telemetry.report=false", "checkpoint.save=false", "train.eval_every=0", f"run.folder={run}"]
        started = Launched(["-m", "torch.distributed.run", *options, "examples/tiny.toml", *quiet, *overrides], folder)
    else:
        started = Ours(folder, NUM_RANKS, [*overrides, f"elastic.enabled={str(lane == 'on').lower()}"])
    with started:
        if status := started.end():
            raise LaneFailed(f"the lane '{lane}' ended with status {status}; see {folder}/printed.log")
    return read_turn(lines_of(run / "metrics" / "rank-00000.jsonl"))


def read_turn(lines: Sequence[Mapping[str, Any]]) -> Turn:
    steps = [line for line in lines if line["event"] == "step"][_SKIPPED:]
    snapshots = [line for line in lines if line["event"] == "snapshots"]
    seconds = median(float(step["seconds"]) for step in steps)
    return Turn(seconds, int(steps[-1]["memory_bytes"]), snapshots[-1] if snapshots else None)


def compare(turns: Mapping[str, Sequence[Turn]], batch: int) -> dict[str, Any]:
    ratio = {lane: Spread.of(_ratios(turns["on"], turns[lane])) for lane in LANES if lane != "on"}
    step_ms = Spread.of(1000 * turn.step_s for turn in turns["off"])
    copies = [turn.snapshots for turn in turns["on"] if turn.snapshots is not None]
    every = sorted({int(one["every"]) for one in copies})
    copied = max((int(one["bytes"]) for one in copies), default=0)
    extra = median(turn.memory_bytes for turn in turns["on"]) - median(turn.memory_bytes for turn in turns["off"])
    words = f"{ratio['off'].words(4)} of the rate without, at {step_ms.median:.0f} ms a step"
    return {
        "batch": batch,
        "step_ms": step_ms.fields(1),
        "ratio": {lane: spread.fields(4) for lane, spread in ratio.items()},
        "snapshot_every": every,
        "snapshot_bytes_per_rank": copied,
        "snapshot_cost_ms": round(1000 * median(float(one["cost_s"]) for one in copies), 3) if copies else None,
        "resident_bytes_more": int(extra),
        "words": f"{words}; {copied / 2**20:.1f} MiB of copies a rank, one in {every} steps",
    }


def _ratios(on: Sequence[Turn], other: Sequence[Turn]) -> list[float]:
    return [without.step_s / with_.step_s for with_, without in zip(on, other, strict=True)]


def judge(figures: Mapping[str, Mapping[str, Any]], rows: Sequence[str]) -> bool:
    """All rows were measured on long steps with copies taken, and meet the goal."""
    if set(rows) != set(ROWS):
        return False
    long = all(figures[row]["step_ms"]["median"] >= TARGET_MS for row in rows)
    kept = all(figures[row]["snapshot_bytes_per_rank"] > 0 for row in rows)
    return long and kept and all(figures[row]["ratio"]["off"]["median"] >= GOAL for row in rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="turns of every lane (default: 8)")
    parser.add_argument("--steps", type=int, default=25, help="steps of a turn that count (default: 25)")
    parser.add_argument("--batch", type=int, default=0, help="samples a step; default: chosen by measuring")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="layouts (default: all)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
