"""How near does a calibrated plan come to the steps that we measure on this CPU, and does it pick a fast layout?

``closeranks plan calibrate`` measures products, memory, collectives, and steps of the job by one and by two workers,
unsharded and split over the tensor axis, none of them in a layout and with a micro-batch that is judged. Every layout
below is predicted, and trained for a few steps in rounds that begin with another layout each, some before the
calibration and some after it. Errors are of the median over the rounds. Nothing else may run meanwhile: a run beside
which other processes ran is repeated, whatever it measured.

    python benchmarks/plan_cpu.py                  about five minutes on a quiet machine with two cores
    python benchmarks/plan_cpu.py --quick          two layouts, few steps: whether it runs
    python benchmarks/plan_cpu.py --calibration mine.json     without measuring anew
    python benchmarks/plan_cpu.py --command        every run a closeranks train of its own, not a session of workers
                                                   that are forked here; ten seconds longer for each run
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from quiet import Watch
from results import begin, conclude, say
from rounds import order

from closeranks.facts.calibration import Calibration, calibration_text, load_calibration
from closeranks.facts.cluster import parse_cluster
from closeranks.lab.calibrate.calibrate import CalibrationRequest, calibrate
from closeranks.lab.calibrate.job_steps import StepRun, StepRunFailed, measure_run, run_steps
from closeranks.lab.calibrate.shapes import JobShapes
from closeranks.plan.check.measured_step import GROUPS, StepGroups, planned_groups
from closeranks.plan.step_time.estimate import estimate_step
from closeranks.run.job.job import load_job

JOB = Path(__file__).with_name("plan_cpu.toml")
MEAN_ERROR, PICK = 0.15, 0.10
ATTEMPTS, MOST_DISTURBED = 2, 0.3


@dataclass(frozen=True, slots=True)
class Row:
    """A layout with its micro-batch."""

    name: str
    num_workers: int
    overrides: tuple[str, ...]

    def run(self, num_steps: int) -> StepRun:
        return StepRun(JOB, self.overrides, self.num_workers, num_steps)


def _row(num_workers: int, layout: str, micro_batch: int, recompute: str = "none") -> Row:
    words = (layout, f"micro-batch {micro_batch}", *([f"recompute {recompute}"] if recompute != "none" else []))
    overrides = (f"layout={layout}", f"train.micro_batch={micro_batch}", f"train.recompute={recompute}")
    return Row(", ".join(words), num_workers, overrides)


ROWS = (
    _row(1, "data=1", 1),
    _row(1, "data=1", 4, "full"),
    _row(2, "data=2", 1),
    _row(2, "data=2", 4, "full"),
    _row(2, "data=2", 2, "selective"),
    _row(2, "data=2 zero=1", 2),
    _row(2, "data=2 zero=2", 2),
    _row(2, "data=2 zero=3", 2),
    _row(2, "tensor=2", 2),
    _row(2, "pipeline=2", 1),
    _row(2, "pipeline=2", 2),
    _row(4, "data=4", 1),
    _row(4, "data=2 tensor=2", 2),
)


def main() -> None:
    args = _arguments()
    rows = (ROWS[2], ROWS[8]) if args.quick else ROWS
    measured: dict[str, list[StepGroups]] = {row.name: [] for row in rows}
    before = 0 if args.calibration else args.rounds // 2
    _measure(rows, measured, range(before), args)
    calibration = load_calibration(args.calibration) if args.calibration else _calibrated(args)
    _measure(rows, measured, range(before, args.rounds), args)
    predicted = {row.name: predict(row, calibration) for row in rows}
    figures = compare(predicted, {name: steps for name, steps in measured.items() if steps})
    goal = (
        f"mean error at most {MEAN_ERROR:.0%} over at least 10 layouts; the pick within {PICK:.0%} of the best, or its"
    )
    conclude("plan_cpu", figures, f"{goal} spread", not args.quick and judge(figures))


def _measure(
    rows: Sequence[Row], measured: Mapping[str, list[StepGroups]], rounds: range, args: argparse.Namespace
) -> None:
    by_name = {row.name: row for row in rows}
    for number in rounds:
        for name in order(list(by_name), 5 * number):
            try:
                measured[name].append(_undisturbed(by_name[name].run(args.steps), args.command))
                say(f"round {number + 1}: {name}: {1e3 * measured[name][-1].seconds:.0f} ms")
            except StepRunFailed as error:
                say(f"round {number + 1}: {name}: failed: {error}")


def _undisturbed(run: StepRun, is_command: bool) -> StepGroups:
    for _ in range(ATTEMPTS):
        with Watch() as watch:
            found = measure_run(run).step if is_command else run_steps(run)
        if watch.share <= MOST_DISTURBED:
            return found
    raise StepRunFailed(f"other processes ran {watch.share:.0%} of the time, in {ATTEMPTS} attempts")


def _calibrated(args: argparse.Namespace) -> Calibration:
    job = load_job(JOB).value
    shapes = JobShapes(job.model.shape(), job.data.seq_len, job.train.micro_batch)
    request = CalibrationRequest("cpu", ("fp32",), (shapes,), (JOB,), args.seconds)
    began_at = time.monotonic()
    with Watch() as watch:
        found = calibrate(request, lambda line: say(f"  {line}"))
    say(f"calibrated in {time.monotonic() - began_at:.0f} s; other processes ran {watch.share:.0%} of the time")
    if args.save:
        args.save.write_text(calibration_text(found))
    return found


def predict(row: Row, calibration: Calibration) -> dict[str, float]:
    """Seconds by group of parts."""
    run = row.run(3)
    cluster = parse_cluster(f"{row.num_workers}xcpu")
    estimate = estimate_step(run.workload(), run.choice(), cluster, calibration)
    return planned_groups({part.name: part.seconds for part in estimate.parts})


def compare(
    predicted: Mapping[str, Mapping[str, float]], measured: Mapping[str, Sequence[StepGroups]]
) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    for name, steps in measured.items():
        seconds = [step.seconds for step in steps]
        planned, middle = sum(predicted[name].values()), median(seconds)
        groups = {group: fmean(step.groups[group] for step in steps) for group in GROUPS}
        rows[name] = {
            "predicted_ms": round(1e3 * planned, 1),
            "measured_ms": round(1e3 * middle, 1),
            "spread_ms": [round(1e3 * min(seconds), 1), round(1e3 * max(seconds), 1)],
            "error": round(planned / middle - 1, 4),
            "groups_ms": {
                group: [round(1e3 * predicted[name][group], 1), round(1e3 * groups[group], 1)] for group in GROUPS
            },
        }
        say(f"{name}: predicted {1e3 * planned:.0f} ms, measured {1e3 * middle:.0f} ms, {rows[name]['error']:+.1%}")
    pick = min(rows, key=lambda name: rows[name]["predicted_ms"])
    best = min(rows, key=lambda name: rows[name]["measured_ms"])
    errors = [abs(row["error"]) for row in rows.values()]
    return {
        "num_layouts": len(rows),
        "mean_error": round(fmean(errors), 4),
        "largest_error": max(errors),
        "pick": pick,
        "best": best,
        "pick_over_best": round(rows[pick]["measured_ms"] / rows[best]["measured_ms"], 4),
        "is_in_spread": rows[pick]["spread_ms"][0] <= rows[best]["spread_ms"][1],
        "rows": rows,
    }


def judge(figures: Mapping[str, Any]) -> bool:
    is_near = figures["pick_over_best"] <= 1 + PICK or figures["is_in_spread"]
    return bool(figures["num_layouts"] >= 10 and figures["mean_error"] <= MEAN_ERROR and is_near)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of a run; the first and the last do not count")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long products and attention are measured")
    parser.add_argument("--calibration", type=Path, help="a file of closeranks plan calibrate, instead of measuring")
    parser.add_argument("--save", type=Path, help="where the calibration is written")
    parser.add_argument("--command", action="store_true", help="measure by closeranks train")
    parser.add_argument("--quick", action="store_true", help="two layouts, one round")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.steps, args.seconds = 1, 4, 1.0
    os.environ.pop("OMP_NUM_THREADS", None)  # workers share the cores evenly, as in a run
    return args


if __name__ == "__main__":
    begin(main)
