"""How much of the speed that is there does a synchronous run use if one worker is slow?

Four workers under CPU quotas of 40, 40, 40 and 10% of a processor, by control groups, 32 micro-batches a step; once
with equal shares and once with ``elastic.stragglers = "rebalance"``. What the sum of speeds allows is measured apart:
each kind of worker alone, under its quota. With ``data=2 tensor=2`` both workers of a data rank have its quota. Every
loss and sample of the rebalanced run is compared with those of a run without quotas and with equal shares.

    python benchmarks/rebalance.py                              three layouts, about ten minutes; needs root
    python benchmarks/rebalance.py --layouts "data=4"           one of them
    python benchmarks/rebalance.py --layouts "data=4" --steps 300    do shares come to rest?
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
from statistics import median
from typing import Any

from results import conclude, say

NUM_MICRO, NUM_PLAIN, NUM_ALONE = 32, 8, 8
FAST, SLOW = 0.4, 0.1
_SETTLED = 0.4
"""The part of a run before which shares may still change."""
_GOAL, _MOST_CHANGES = 0.8, 4
_SAME = 1e-4
"""Of a loss: float32, summed in another order."""
_JOB = Path(__file__).with_name("straggler.toml")
_COMMON = ("data.log_samples=true", "elastic.slow_steps=10", "train.eval_samples=1", "elastic.hang_floor_s=120")


@dataclass(frozen=True, slots=True)
class Layout:
    """``alone``: the layout of one data rank by itself."""

    text: str
    data: int
    alone: str

    def quotas(self, recovers: bool = False) -> list[float]:
        """Of each rank: tensor is fastest, and the last data rank is slow."""
        width = 4 // self.data
        return [FAST] * (4 - width) + [FAST if recovers else SLOW] * width


LAYOUTS = {
    one.text: one
    for one in (
        Layout("data=4", 4, "data=1"),
        Layout("data=4 zero=1", 4, "data=1"),
        Layout("data=2 tensor=2", 2, "tensor=2"),
    )
}


@dataclass(frozen=True, slots=True)
class Ran:
    seconds: list[float]
    losses: list[float]
    changes: list[dict[str, Any]]
    samples: list[tuple[int, int, tuple[int, ...]]]

    def step_s(self, skipped: int) -> float:
        return median(self.seconds[skipped:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=60, help="of each rebalanced run; the slow one recovers after 3/5")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="closeranks-rebalance-") as folder:
        figures = {
            name: compare(Path(folder, name.replace(" ", "-")), LAYOUTS[name], args.steps) for name in args.layouts
        }
    met = all(
        one["of_the_possible"] >= _GOAL and one["is_same_run"] and one["num_changes"] <= _MOST_CHANGES
        for one in figures.values()
    )
    goal = "at least 0.8 of the throughput that the sum of speeds allows; same samples and losses; shares come to rest"
    conclude("rebalance", figures, goal, met)


def compare(folder: Path, layout: Layout, steps: int) -> dict[str, Any]:
    speeds = [alone(folder / f"alone-{quota}", layout, quota) for quota in (FAST, SLOW)]
    possible = (layout.data - 1) * speeds[0] + speeds[1]
    plain = train(folder / "plain", layout.text, layout.quotas(), NUM_PLAIN, NUM_MICRO, ())
    slow_until = steps * 3 // 5
    ran = train(
        folder / "rebalanced",
        layout.text,
        layout.quotas(),
        steps,
        NUM_MICRO,
        ("elastic.stragglers=rebalance",),
        slow_until,
    )
    while_slow = Ran(ran.seconds[:slow_until], [], [], [])
    undisturbed = train(folder / "undisturbed", layout.text, [1.0] * 4, steps, NUM_MICRO, ())
    difference = max(abs(a - b) / abs(b) for a, b in zip(ran.losses, undisturbed.losses, strict=True))
    found = {
        "micro_batches_per_s_alone": [round(speed, 2) for speed in speeds],
        "possible": round(possible, 2),
        "plain": round(NUM_MICRO / plain.step_s(2), 2),
        "rebalanced": round(NUM_MICRO / while_slow.step_s(int(slow_until * _SETTLED)), 2),
        "recovered": round(NUM_MICRO / ran.step_s(steps * 4 // 5), 2),
        "shares": [[one["step"], one["shares"]] for one in ran.changes],
        "num_changes": len(ran.changes),
        "loss_difference": difference,
        "is_same_run": ran.samples == undisturbed.samples and difference < _SAME,
    }
    found["of_the_possible"] = round(found["rebalanced"] / possible, 3)
    found["plain_of_the_possible"] = round(found["plain"] / possible, 3)
    say(f"{layout.text:<16} {json.dumps(found)}")
    return found


def alone(folder: Path, layout: Layout, quota: float) -> float:
    """Micro-batches per second of one data rank by itself, under its quota."""
    width = 4 // layout.data
    ran = train(folder, layout.alone, [quota] * width, NUM_ALONE, 4, ())
    return 4 / ran.step_s(2)


def train(
    folder: Path,
    layout: str,
    quotas: list[float],
    steps: int,
    num_micro: int,
    settings: tuple[str, ...],
    slow_until: int = 0,
) -> Ran:
    """Each worker has its quota from the first step to the last, the slow ones theirs until ``slow_until``; a quota of
    1 is none."""
    parts = []
    for rank, quota in enumerate(quotas):
        if quota == 1.0:
            continue
        if quota == SLOW and slow_until:
            parts.append(f"slow(rank={rank}, step=1, steps={slow_until}, share={quota})")
            parts.append(f"slow(rank={rank}, step={slow_until + 1}, steps={steps - slow_until}, share={FAST})")
        else:
            parts.append(f"slow(rank={rank}, step=1, steps={steps}, share={quota})")
    sizes = (f"train.steps={steps}", f"train.global_batch={4 * num_micro}", "train.micro_batch=4")
    words = ["train", str(_JOB), "-n", str(len(quotas)), f"run.folder={folder}", *sizes, f"layout={layout}"]
    command = [sys.executable, "-m", "closeranks", *words, *_COMMON, *settings]
    command += ["--faults", ", ".join(parts)] if parts else []
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "metrics" / "rank-00000.jsonl").read_text().splitlines()]
    taken = [line for line in lines if line["event"] == "step"]
    return Ran(
        [line["seconds"] for line in taken],
        [line["loss"] for line in taken],
        [line for line in lines if line["event"] == "shares"],
        sorted(
            (row["step"], row["micro_batch"], tuple(row["samples"]))
            for path in folder.rglob("samples-*.jsonl")
            for row in map(json.loads, path.read_text().splitlines())
        ),
    )


if __name__ == "__main__":
    main()
