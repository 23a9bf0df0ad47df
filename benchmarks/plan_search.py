"""How long does a full search over the layouts of a large model take, in a fresh process on one core?

``closeranks plan`` for Llamas of 70B and 405B parameters on 16,384 GPUs, from the start of Python to the printed table:
every legal layout with its micro-batches, recompute and schedules. Also ``closeranks plan --help``. The seconds are
those of the processor, so that other work on the machine does not count; the best of several runs.

    python benchmarks/plan_search.py
    python benchmarks/plan_search.py --cluster 1024xh100 --preset 70b --global-batch 1024
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import conclude, say

from closeranks.facts.shapes.llama import PRESETS

LIMIT_S = 3.0
GOAL = f"every full search takes less than {LIMIT_S:g} s of one core, start included"
JOB = Path(__file__).parents[1] / "examples" / "plans" / "llama-70b.toml"


@dataclass(frozen=True, slots=True)
class Timed:
    """A command that has ended."""

    seconds: float
    """Of the processor, in user and system mode."""
    out: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="16384xh100")
    parser.add_argument("--preset", nargs="+", default=["70b", "405b"], choices=PRESETS)
    parser.add_argument("--global-batch", nargs="+", type=int, default=[2048, 16384])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    searches = [
        searched(preset, args.cluster, batch, args.repeats) for preset in args.preset for batch in args.global_batch
    ]
    help_s = min(timed("--help").seconds for _ in range(args.repeats))
    say(f"plan --help: {help_s:.2f} s")
    slowest = max(search["seconds"] for search in searches)
    conclude(
        "plan_search", {"seconds": slowest, "help_s": round(help_s, 3), "searches": searches}, GOAL, slowest < LIMIT_S
    )


def searched(preset: str, cluster: str, global_batch: int, repeats: int) -> dict[str, Any]:
    words = [str(JOB), f"model.preset={preset}", f"train.global_batch={global_batch}", "--cluster", cluster, "--json"]
    best = min((timed(*words) for _ in range(repeats)), key=lambda one: one.seconds)
    found = json.loads(best.out)
    advised = None if found["advised"] is None else found["plans"][found["advised"]]["layout"]
    say(f"{preset} on {cluster}, {global_batch:,} samples a step: {best.seconds:.2f} s; advised: {advised}")
    return {
        "preset": preset,
        "cluster": cluster,
        "global_batch": global_batch,
        "seconds": round(best.seconds, 3),
        "num_choices": found["num_choices"],
        "num_layouts": found["num_layouts"],
        "advised": advised,
    }


def timed(*words: str) -> Timed:
    """``closeranks plan`` with these words."""
    one_core = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "closeranks", "plan", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=one_core) as process:
        assert process.stdout is not None
        out = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {process.returncode}")
    return Timed(used.ru_utime + used.ru_stime, out)


if __name__ == "__main__":
    main()
