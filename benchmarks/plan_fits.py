"""Is "fits" right, and how often is the answer only "borderline"?

Three questions to the verdict that `closeranks plan` gives about memory. How many choices are borderline: Llamas of 1
to 70 billion parameters on 1 to 64 H100, all legal layouts, micro-batches, recompute and precisions, uncompiled, in
closed form. Is it right: of those choices some near the limit are drawn, one rank of each takes a step on tensors
without data (``closeranks plan dry-run``), and devices of every size around its peak are asked about. And what does it
say of published runs, which all did run? Nothing is timed, and no memory is needed. Invariant: draws are seeded, so
that the figures are always the same.

    PYTHONPATH=src python benchmarks/plan_fits.py            some twenty minutes on one core
    PYTHONPATH=src python benchmarks/plan_fits.py --quick    one model on 8 GPUs, two dry runs
    PYTHONPATH=src python benchmarks/plan_fits.py --case 3b  all choices, and the dry runs whose line contains it
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plan_dry_run import JOB, Case
from results import begin, conclude, say

from closeranks.facts.cluster import Cluster, parse_cluster
from closeranks.facts.memory.state_bytes import NamedBytes
from closeranks.plan.memory.estimate import MemoryEstimate, MemoryEstimator, Verdict, memory_estimate
from closeranks.plan.search.space import SearchSpace, candidate_choices
from closeranks.plan.step_time.workload import PlanChoice
from closeranks.plan.validation.run_plan import plan_runs
from closeranks.plan.validation.run_table import load_runs
from closeranks.run.dry_run.dry_run import dry_run
from closeranks.run.job.describe import describe_job
from closeranks.run.job.job import load_job
from closeranks.run.job.planned import planned_choice, planned_workload

RUNS = Path(__file__).with_name("plan_runs.csv")
PRESETS = ("1b", "3b", "8b", "13b", "70b")
NUM_DEVICES = (1, 8, 64)
SEQ_LEN, GLOBAL_BATCH = 4096, 512
SPACE = SearchSpace(micro_batches=(1, 2, 4, 8), precisions=("bf16", "fp32"), compiled=(False,))
DRAWN = {"1b": 9, "3b": 7, "8b": 6, "13b": 4}
"""Dry runs by preset; one of 70b takes minutes, and plan_dry_run.py has four of them."""
LEAST_DRY_RUNS = 24
MOST_BORDERLINE = 0.15
NEAR = (0.75, 1.35)
"""Of the device's memory: what a choice takes that is near the limit."""
SIZES = [round(0.70 + 0.005 * number, 3) for number in range(161)]
"""Of the peak: the devices that are asked about."""
GOAL = (
    f"at most {MOST_BORDERLINE:.0%} of all choices are borderline; of {LEAST_DRY_RUNS} dry runs or more no device is "
    "said to fit that is too small, nor the reverse; no published run is said not to fit"
)
_PRECISIONS = {"fp32": "float32", "bf16": "bf16"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A choice, and what one of its devices takes."""

    preset: str
    choice: PlanChoice
    memory: MemoryEstimate

    @property
    def filled(self) -> float:
        return self.memory.total_bytes / self.memory.capacity_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model on 8 GPUs, two dry runs")
    parser.add_argument("--case", default="", help="only dry runs whose line contains this")
    args = parser.parse_args()
    presets, counts, drawn = (("1b",), (8,), {"1b": 2}) if args.quick else (PRESETS, NUM_DEVICES, DRAWN)
    asked = [one for preset in presets for count in counts for one in all_choices(preset, count)]
    figures: dict[str, Any] = {"choices": verdict_figures(asked), "published": published_verdicts()}
    say(f"choices: {figures['choices']}")
    say(f"published runs that state their recompute: {figures['published']}")
    cases = [case_of(one) for preset, count in drawn.items() for one in draw_near(asked, preset, count)]
    rows = [check_peak(case) for case in cases if args.case in case.name]
    figures |= {"num_dry_runs": len(rows), **peak_figures(rows), "rows": rows}
    conclude("plan_fits", figures, GOAL, is_met(figures))


def all_choices(preset: str, num_devices: int) -> Iterator[Asked]:
    words = [f"model.preset={preset}", f"data.seq_len={SEQ_LEN}", f"train.global_batch={GLOBAL_BATCH}"]
    job, cluster = load_job(JOB, [*words, "train.micro_batch=1"]).value, parse_cluster(f"{num_devices}xh100")
    estimator = MemoryEstimator(planned_workload(job), cluster)
    needs, template = describe_job(job).constraints, planned_choice(job, num_devices)
    for choice in candidate_choices(SPACE, needs, template, num_devices, cluster.domain_size):
        yield Asked(preset, choice, estimator.estimate(choice))


def verdict_figures(asked: Sequence[Asked]) -> dict[str, Any]:
    """Shares of all choices, and of those that take between half and twice the device's memory."""
    near = [one for one in asked if 0.5 <= one.filled <= 2]
    by_preset = {
        preset: borderline_share(one for one in asked if one.preset == preset)
        for preset in dict.fromkeys(one.preset for one in asked)
    }
    return {
        "num": len(asked),
        "verdicts": dict(Counter(one.memory.verdict for one in asked)),
        "borderline": borderline_share(asked),
        "borderline_by_preset": by_preset,
        "num_half_to_twice": len(near),
        "borderline_half_to_twice": borderline_share(near),
    }


def borderline_share(asked: Iterable[Asked]) -> float:
    found = Counter(one.memory.verdict for one in asked)
    return round(found["borderline"] / max(1, found.total()), 4)


def published_verdicts() -> dict[Verdict, int]:
    plans, _ = plan_runs(load_runs(RUNS).runs)
    return dict(
        Counter(
            memory_estimate(plan.workload, plan.choice, plan.cluster).verdict for plan in plans if plan.run.recompute
        )
    )


def draw_near(asked: Sequence[Asked], preset: str, count: int) -> list[Asked]:
    """Of a preset's choices near the limit; each of another layout where there are enough."""
    near = [one for one in asked if one.preset == preset and is_near(one)]
    others, found = list[Asked](), dict[str, Asked]()
    for one in random.Random(preset).sample(near, len(near)):
        if found.setdefault(str(one.choice.layout), one) is not one:
            others.append(one)
    return [*found.values(), *others][:count]


def is_near(one: Asked) -> bool:
    return NEAR[0] <= one.filled <= NEAR[1]


def case_of(one: Asked) -> Case:
    """A step of as many micro-batches as fill the pipeline, and no more than the choice has."""
    choice = one.choice
    num_micro = min(choice.num_micro(GLOBAL_BATCH), max(2, 2 * choice.layout.pipeline))
    return Case(
        one.preset, choice.layout.num_ranks, str(choice.layout), SEQ_LEN, choice.micro_batch, num_micro,
        _PRECISIONS[choice.precision], choice.recompute,
    )  # fmt: skip


def check_peak(case: Case) -> dict[str, Any]:
    """What is said of devices of every size, beside the peak of a dry run: tensors alone, on both sides."""
    job, cluster = case.job(), parse_cluster(f"{case.num_ranks}xh100")
    planned = planned_peak(case, cluster)
    found = dry_run(job, case.num_ranks, num_micro=case.num_micro, report=lambda line: None)
    row = {
        "case": case.name,
        "peak_gib": round(found.peak.dry / 2**30, 2),
        "error": round(planned / found.peak.dry - 1, 4),
        **said_of_sizes(planned, found.peak.dry),
        "seconds": round(found.seconds, 1),
    }
    say(f"{case.name}: {row['peak_gib']} GiB, planned {row['error']:+.1%}, {row['num_wrong']} wrong verdicts")
    return row


def planned_peak(case: Case, cluster: Cluster) -> int:
    job = case.job()
    return memory_estimate(planned_workload(job), planned_choice(job, case.num_ranks), cluster).allocated_bytes


def said_of_sizes(planned: int, peak: int) -> dict[str, Any]:
    """Of devices with a share of the peak's memory: which are wrongly judged, the smallest said to fit, and the largest
    said not to."""
    whole = MemoryEstimate((NamedBytes("tensors", planned),), peak, "")
    said = {size: replace(whole, capacity_bytes=round(size * peak)).verdict for size in SIZES}
    fits = [size for size, verdict in said.items() if verdict == "fits"]
    fails = [size for size, verdict in said.items() if verdict == "does not fit"]
    return {
        "least_that_fits": min(fits, default=None),
        "most_that_does_not": max(fails, default=None),
        "num_wrong": sum(size < 1 for size in fits) + sum(size >= 1 for size in fails),
    }


def peak_figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "num_wrong": sum(row["num_wrong"] for row in rows),
        "least_that_fits": min((row["least_that_fits"] for row in rows), default=None),
        "most_that_does_not": max((row["most_that_does_not"] for row in rows), default=None),
        "largest_error": max((abs(row["error"]) for row in rows), default=None),
    }


def is_met(figures: dict[str, Any]) -> bool:
    return (
        figures["choices"]["borderline"] <= MOST_BORDERLINE
        and figures["num_dry_runs"] >= LEAST_DRY_RUNS
        and figures["num_wrong"] == 0
        and not figures["published"].get("does not fit")
    )


if __name__ == "__main__":
    begin(main)
