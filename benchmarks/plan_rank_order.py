"""How good a rank order inside sweeps do errors of a given size allow, if they are independent of the layout?

Draws predictions that miss the measured times by normal errors (of the logarithm) of a given mean size, and ranks them
as `closeranks plan validate` ranks ours. Invariant: the draws are seeded, so that the figures are always the same.

    PYTHONPATH=src python benchmarks/plan_rank_order.py
    PYTHONPATH=src python benchmarks/plan_rank_order.py --runs mine.csv
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import exp, pi, sqrt
from pathlib import Path
from statistics import mean
from typing import Any

from results import begin, conclude, say

from closeranks.plan.validation.prediction_error import RowError
from closeranks.plan.validation.rank_order import SweepRank, sweep_ranks
from closeranks.plan.validation.report import validate
from closeranks.plan.validation.run_table import load_runs

RUNS = Path(__file__).with_name("plan_runs.csv")
SIZES = (0.02, 0.03, 0.05, 0.08)
DRAWS = 200
GOAL = f"a rank correlation as high as independent errors of {SIZES[-1]:.0%} give"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=RUNS, help="table of published runs")
    rows = validate(load_runs(parser.parse_args().runs)).judged()
    ours = sweep_ranks(rows)
    found: dict[str, Any] = {"draws": DRAWS, "ours": _figures(ours)}
    for size in SIZES:
        found[f"errors of {size:.0%}"] = _figures([sweep for draw in range(DRAWS) for sweep in drawn(rows, size, draw)])
    for name, figures in found.items():
        say(f"{name}: {figures}")
    conclude("plan_rank_order", found, GOAL, found["ours"]["mean"] >= found[f"errors of {SIZES[-1]:.0%}"]["mean"])


def drawn(rows: Sequence[RowError], size: float, seed: int) -> list[SweepRank]:
    """The sweeps of predictions whose mean absolute error is ``size``."""
    numbers, width = random.Random(seed), size * sqrt(pi / 2)
    return sweep_ranks([replace(row, predicted_s=row.plan.measured_s * exp(numbers.gauss(0, width))) for row in rows])


def _figures(sweeps: Sequence[SweepRank]) -> dict[str, float]:
    """By model, and the mean over the sweeps."""
    names = list(dict.fromkeys(sweep.model for sweep in sweeps))
    by_model = {name: mean(one.correlation for one in sweeps if one.model == name) for name in names}
    return {name: round(value, 2) for name, value in {**by_model, "mean": mean(by_model.values())}.items()}


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    begin(main)
