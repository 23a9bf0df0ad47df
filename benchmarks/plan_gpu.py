"""How near do planned step times and peaks of memory come to runs on one GPU?

Products, attention, memory and the optimizer are measured first (``closeranks plan calibrate``). Then each row is
planned, and trained for a few steps in a run of its own: Llamas of 160 million to 3 billion parameters, in three
precisions, with and without recompute and compilation. The peak is ``torch.cuda.max_memory_allocated`` of the run,
the step its median. Rows that the time no longer allows are left out, and counted.

    python benchmarks/plan_gpu.py                         within eight minutes on one H200
    python benchmarks/plan_gpu.py --minutes 15            as many rows as fit into 15
    python benchmarks/plan_gpu.py --device cpu --quick    two small rows: whether it runs; nothing is judged
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from results import begin, conclude, say

from closeranks.facts.calibration import Calibration, calibration_text, load_calibration
from closeranks.facts.cluster import parse_cluster
from closeranks.lab.calibrate.calibrate import CalibrationRequest, calibrate
from closeranks.lab.calibrate.job_steps import MeasuredRun, StepRun, StepRunFailed, measure_run
from closeranks.lab.calibrate.shapes import JobShapes
from closeranks.plan.memory.estimate import memory_estimate
from closeranks.plan.step_time.estimate import estimate_step
from closeranks.run.job.job import load_job

JOB = Path(__file__).with_name("plan_gpu.toml")
PEAK_ERROR, STEP_ERROR = 0.05, 0.10
LEAST_ROWS = 12
LONGEST_ROW_S = 40.0
GOAL = f"mean error of peaks at most {PEAK_ERROR:.0%}, of steps {STEP_ERROR:.0%}, over at least {LEAST_ROWS} rows"
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    preset: str
    micro_batch: int
    recompute: str = "none"
    precision: str = "bf16"
    compiled: bool = True
    num_micro: int = 1
    seq_len: int = 4096

    @property
    def name(self) -> str:
        how = "compiled" if self.compiled else "eager"
        batch = f"{self.num_micro} x {self.micro_batch} x {self.seq_len}"
        return f"{self.preset}, {batch}, {self.precision}, recompute {self.recompute}, {how}"

    def run(self, device: str, num_steps: int) -> StepRun:
        overrides = (
            f"run.device={device}",
            f"model.preset={self.preset}",
            f"data.seq_len={self.seq_len}",
            f"train.micro_batch={self.micro_batch}",
            f"train.global_batch={self.micro_batch * self.num_micro}",
            f"train.recompute={self.recompute}",
            f"train.precision={self.precision}",
            f"train.compile={str(self.compiled).lower()}",
            "telemetry.sample_s=60",
        )
        return StepRun(JOB, overrides, 1, num_steps)


ROWS = (
    Row("1b", 4),
    Row("1b", 8, "selective"),
    Row("1b", 16, "full"),
    Row("1b", 4, compiled=False),
    Row("3b", 2),
    Row("3b", 4, "selective"),
    Row("3b", 8, "full"),
    Row("1b", 4, precision="fp16"),
    Row("1b", 2, precision="float32"),
    Row("1b", 2, num_micro=4),
    Row("1b_untied", 6),
    Row("3b", 4, "full", compiled=False),
    Row("1b", 8, "full", compiled=False),
    Row("160m", 32),
)
QUICK = (
    Row("tiny", 2, precision="float32", compiled=False, seq_len=64),
    Row("tiny", 2, "full", "float32", compiled=False, num_micro=2, seq_len=64),
)


def main() -> None:
    args = _arguments()
    ends_at = time.monotonic() + 60 * args.minutes
    calibration = load_calibration(args.calibration) if args.calibration else _calibrated(args)
    found, left_out = [], 0
    for row in QUICK if args.quick else ROWS:
        if time.monotonic() + LONGEST_ROW_S > ends_at:
            left_out += 1
            continue
        try:
            found.append(compare(row, measure_run(row.run(args.device, args.steps)), calibration, args))
        except StepRunFailed as error:
            found.append({"row": row.name, "failed": str(error)})
        say(str(found[-1]))
    figures = figures_of(found, left_out)
    conclude("plan_gpu", figures, GOAL, args.device == "cuda" and judge(figures))


def _calibrated(args: argparse.Namespace) -> Calibration:
    job = load_job(JOB, [f"model.preset={QUICK[0].preset}", "data.seq_len=64"] if args.quick else []).value
    shapes = JobShapes(job.model.shape(), job.data.seq_len, job.train.micro_batch)
    precision = ("fp32",) if args.device == "cpu" else ("bf16",)
    found = calibrate(
        CalibrationRequest(args.device, precision, (shapes,), (), args.seconds), lambda line: say(f"  {line}")
    )
    if args.save:
        args.save.write_text(calibration_text(found))
    return found


def compare(row: Row, measured: MeasuredRun, calibration: Calibration, args: argparse.Namespace) -> dict[str, Any]:
    run = row.run(args.device, args.steps)
    workload, choice = run.workload(), run.choice()
    cluster = parse_cluster("1xcpu" if args.device == "cpu" else f"1x{args.kind}")
    memory = memory_estimate(workload, choice, cluster)
    step_s = estimate_step(workload, choice, cluster, calibration).seconds
    peak = measured.peak_bytes if args.device == "cuda" else 0  # a CPU tells the resident set
    return {
        "row": row.name,
        "peak_gib": [round(memory.allocated_bytes / GIB, 2), round(peak / GIB, 2)],
        "peak_error": round(memory.allocated_bytes / peak - 1, 4) if peak else None,
        "verdict": memory.verdict,
        "step_ms": [round(1e3 * step_s, 1), round(1e3 * measured.step.seconds, 1)],
        "step_error": round(step_s / measured.step.seconds - 1, 4),
    }


def figures_of(rows: Sequence[dict[str, Any]], left_out: int) -> dict[str, Any]:
    peaks = [abs(row["peak_error"]) for row in rows if row.get("peak_error") is not None]
    steps = [abs(row["step_error"]) for row in rows if "step_error" in row]
    return {
        "num_rows": len(steps),
        "left_out": left_out,
        "failed": sum("failed" in row for row in rows),
        "mean_peak_error": round(fmean(peaks), 4) if peaks else None,
        "largest_peak_error": max(peaks, default=None),
        "mean_step_error": round(fmean(steps), 4) if steps else None,
        "largest_step_error": max(steps, default=None),
        "wrong_verdicts": sum(row.get("verdict") == "does not fit" for row in rows if "step_error" in row),
        "rows": list(rows),
    }


def judge(figures: dict[str, Any]) -> bool:
    if figures["num_rows"] < LEAST_ROWS or figures["failed"] or figures["wrong_verdicts"]:
        return False
    return bool(figures["mean_peak_error"] <= PEAK_ERROR and figures["mean_step_error"] <= STEP_ERROR)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kind", default="h200", help="the device's name in the planner's table")
    parser.add_argument("--minutes", type=float, default=7.5, help="no row begins that might take longer")
    parser.add_argument("--steps", type=int, default=8, help="of a run; the first and the last do not count")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long products and attention are measured")
    parser.add_argument("--calibration", type=Path, help="a file of closeranks plan calibrate, instead of measuring")
    parser.add_argument("--save", type=Path, help="where the calibration is written")
    parser.add_argument("--quick", action="store_true", help="two small rows, few steps")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seconds = 4, 1.0
    return args


if __name__ == "__main__":
    begin(main)
