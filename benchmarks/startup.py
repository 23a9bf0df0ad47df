"""How long does a person wait for the command line?

Starts each command ten times, in turn with the others, and takes wall times. ``import closeranks`` is told beside a
bare start of Python, which it is charged against.

    python benchmarks/startup.py
    python benchmarks/startup.py --runs 3
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from results import conclude, say

ROOT = Path(__file__).resolve().parent.parent
_SCRIPT = Path(sys.executable).with_name("closeranks")
_OURS = [str(_SCRIPT)] if _SCRIPT.exists() else [sys.executable, "-m", "closeranks"]
COMMANDS: dict[str, list[str]] = {
    "python": [sys.executable, "-c", "pass"],
    "import": [sys.executable, "-c", "import closeranks"],
    "help": [*_OURS, "--help"],
    "plan help": [*_OURS, "plan", "--help"],
    "config": [*_OURS, "config", "examples/tiny.toml"],
}
GOALS_S = {"import": 0.1, "help": 0.3, "plan help": 0.3, "config": 0.5}
"""Median seconds; for the import, those beyond a bare start of Python."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="runs of each command (default: 10)")
    args = parser.parse_args()
    figures = summarise(measure(COMMANDS, args.runs))
    for name, figure in figures.items():
        say(f"  {name:<9} best {figure['best_s']:.3f} s, median {figure['median_s']:.3f} s")
    goal = (
        "median: closeranks --help and closeranks plan --help < 0.3 s, closeranks config < 0.5 s, import closeranks < "
        "0.1 s beyond python itself"
    )
    conclude("startup", figures, goal, judge(figures))


def measure(commands: Mapping[str, Sequence[str]], num_runs: int) -> dict[str, list[float]]:
    """Seconds of each command; one run before, unmeasured, fills the caches of files and byte code."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(num_runs + 1):
        for name, command in commands.items():
            began_at = time.perf_counter()
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
            if number > 0:
                seconds[name].append(time.perf_counter() - began_at)
    return seconds


def summarise(seconds: Mapping[str, list[float]]) -> dict[str, dict[str, Any]]:
    figures = {
        name: {"best_s": round(min(runs), 4), "median_s": round(median(runs), 4), "runs": len(runs)}
        for name, runs in seconds.items()
    }
    figures["import"]["beyond_python_s"] = round(figures["import"]["median_s"] - figures["python"]["median_s"], 4)
    return figures


def judge(figures: Mapping[str, Mapping[str, Any]]) -> bool:
    charged = {name: figure.get("beyond_python_s", figure["median_s"]) for name, figure in figures.items()}
    return all(charged[name] < limit_s for name, limit_s in GOALS_S.items())


if __name__ == "__main__":
    main()
