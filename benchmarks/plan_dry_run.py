"""How near do the closed forms of memory and traffic come to one rank that is run without data?

Each case is a Llama on 8 to 1,024 ranks: one rank builds its part and takes a step with the real code on tensors that
have no data (``closeranks plan dry-run``), uncompiled. Beside its peak stand both closed forms of the same step: the
one that counts weight by weight (``closeranks layout``) and the one of searches (``closeranks plan``). Bytes sent are
compared for each axis. Nothing is timed, and no memory is needed.

    python benchmarks/plan_dry_run.py                  about twenty minutes on one core
    python benchmarks/plan_dry_run.py --quick          the small cases
    python benchmarks/plan_dry_run.py --case 7b        those whose line contains it
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import begin, conclude, say

from closeranks.cli.layout_list import with_layout
from closeranks.facts.cluster import parse_cluster
from closeranks.facts.layout import Layout
from closeranks.plan.memory.estimate import memory_estimate
from closeranks.run.dry_run.dry_run import DryRun, dry_run
from closeranks.run.job.job import Job, load_job
from closeranks.run.job.planned import planned_choice, planned_workload

JOB = Path(__file__).parents[1] / "examples" / "tiny.toml"
TOLERANCE = 0.05
LEAST_BYTES = 100 * 2**20
"""Of a peak that is judged: below, single buckets and the smallest tensors weigh too much."""
GOAL = f"both closed forms within {TOLERANCE:.0%} of every peak above 100 MiB, and bytes sent equal"


@dataclass(frozen=True, slots=True)
class Case:
    preset: str
    num_ranks: int
    layout: str
    seq_len: int
    micro_batch: int
    num_micro: int
    precision: str
    recompute: str = "none"

    @property
    def name(self) -> str:
        batch = f"{self.num_micro} x {self.micro_batch} x {self.seq_len}"
        return f"{self.preset} on {self.num_ranks}: {self.layout}, {batch}, {self.precision}, {self.recompute}"

    def job(self) -> Job:
        """With a step of just ``num_micro`` micro-batches on each data rank."""

        changes = [
            f"model.preset={self.preset}",
            f"data.seq_len={self.seq_len}",
            f"train.micro_batch={self.micro_batch}",
            f"train.global_batch={self.num_data * self.micro_batch * self.num_micro}",
            f"train.precision={self.precision}",
            f"train.recompute={self.recompute}",
        ]
        return with_layout(load_job(JOB, changes).value, self.layout, self.num_ranks)

    @property
    def num_data(self) -> int:
        layout = Layout.parse(self.layout)
        return self.num_ranks // (layout.tensor * layout.pipeline)


CASES = (
    Case("tiny", 8, "data=8", 64, 3, 1, "float32"),
    Case("tiny", 8, "zero=2", 64, 3, 1, "float32"),
    Case("160m", 8, "data=8", 1024, 4, 1, "float32"),
    Case("160m", 64, "zero=2 tensor=2", 1024, 4, 2, "bf16"),
    Case("160m", 8, "pipeline=4", 1024, 2, 4, "float32", "selective"),
    Case("160m", 8, "zero=3 tensor=2", 1024, 4, 1, "bf16", "full"),
    Case("1b", 8, "data=8", 2048, 1, 2, "bf16"),
    Case("1b", 8, "zero=1", 2048, 1, 1, "float32"),
    Case("1b", 8, "zero=2", 2048, 2, 4, "bf16", "selective"),
    Case("1b", 64, "zero=3 shard=8", 2048, 4, 1, "bf16", "full"),
    Case("1b", 8, "data=1 tensor=8", 4096, 4, 1, "float32"),
    Case("1b", 8, "pipeline=4", 2048, 1, 8, "bf16"),
    Case("1b_untied", 64, "zero=1 tensor=4 pipeline=2 schedule=gpipe", 2048, 1, 4, "bf16", "full"),
    Case("1b", 1024, "zero=2", 2048, 1, 1, "bf16"),
    Case("3b", 8, "zero=3", 4096, 2, 2, "bf16", "selective"),
    Case("3b", 64, "zero=1 tensor=2", 4096, 4, 1, "bf16", "full"),
    Case("7b", 8, "zero=3", 2048, 1, 1, "bf16", "full"),
    Case("7b", 64, "zero=2 tensor=4", 4096, 1, 2, "bf16", "selective"),
    Case("7b", 64, "zero=1 pipeline=4 schedule=interleaved-1f1b", 2048, 1, 8, "bf16"),
    Case("7b", 64, "zero=1 pipeline=4 schedule=zbv", 2048, 1, 8, "bf16"),
    Case("13b", 64, "zero=3", 4096, 1, 2, "float32", "full"),
    Case("13b", 64, "zero=1 tensor=8", 4096, 1, 1, "bf16"),
    Case("13b", 64, "zero=3 tensor=4 pipeline=4", 2048, 1, 4, "bf16", "selective"),
    Case("13b", 1024, "zero=3 shard=64", 4096, 1, 4, "bf16", "selective"),
    Case("70b", 1024, "zero=3 tensor=8", 4096, 1, 1, "bf16", "full"),
    Case("70b", 1024, "zero=1 tensor=8 pipeline=8", 4096, 1, 8, "bf16", "selective"),
    Case("70b", 1024, "zero=3", 4096, 1, 1, "bf16", "none"),
    Case("70b", 64, "tensor=8 pipeline=8", 4096, 2, 8, "bf16", "full"),
)
QUICK = CASES[:6]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first six cases")
    parser.add_argument("--case", default="", help="only cases whose line contains this")
    args = parser.parse_args()
    chosen = [case for case in (QUICK if args.quick else CASES) if args.case in case.name]
    rows = [compare(case) for case in chosen]
    conclude("plan_dry_run", figures_of(rows), GOAL, not args.quick and judge(rows))


def compare(case: Case) -> dict[str, Any]:
    job = case.job()
    found = dry_run(job, case.num_ranks, num_micro=case.num_micro, report=lambda line: None)
    cluster = parse_cluster(f"{case.num_ranks}xh100")
    planned = memory_estimate(planned_workload(job), planned_choice(job, case.num_ranks), cluster).allocated_bytes
    row = {
        "case": case.name,
        "pipeline_rank": found.pipeline_rank,
        "parts_mib": {part.name: [_mib(part.closed), _mib(part.dry)] for part in found.memory},
        "planned_mib": _mib(planned),
        "error": round(found.peak.difference or 0.0, 4),
        "planned_error": round(planned / found.peak.dry - 1, 4),
        "sent_mib": sent_by_axis(found),
        "is_traffic_equal": all(one.calls.difference == one.sent_bytes.difference == 0 for one in found.traffic),
        "is_judged": found.peak.dry >= LEAST_BYTES,
        "seconds": round(found.seconds, 1),
    }
    peak = f"{_mib(found.peak.dry):,.0f} MiB, by weights {row['error']:+.1%}, planned {row['planned_error']:+.1%}"
    say(f"{case.name}: {peak}, traffic {'equal' if row['is_traffic_equal'] else 'NOT equal'}, {row['seconds']:.0f} s")
    return row


def sent_by_axis(found: DryRun) -> dict[str, list[float]]:
    closed, dry = Counter[str](), Counter[str]()
    for row in found.traffic:
        closed[row.axis] += row.sent_bytes.closed
        dry[row.axis] += row.sent_bytes.dry
    return {axis: [_mib(closed[axis]), _mib(dry[axis])] for axis in closed | dry}


def _mib(num_bytes: int) -> float:
    return round(num_bytes / 2**20, 2)


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    judged = [row for row in rows if row["is_judged"]]
    return {
        "num_cases": len(rows),
        "num_judged": len(judged),
        "largest_error": max((abs(row["error"]) for row in judged), default=None),
        "largest_planned_error": max((abs(row["planned_error"]) for row in judged), default=None),
        "num_equal_traffic": sum(row["is_traffic_equal"] for row in rows),
        "rows": rows,
    }


def judge(rows: Sequence[dict[str, Any]]) -> bool:
    judged = [max(abs(row["error"]), abs(row["planned_error"])) for row in rows if row["is_judged"]]
    return len(judged) >= 20 and max(judged) <= TOLERANCE and all(row["is_traffic_equal"] for row in rows)


if __name__ == "__main__":
    begin(main)
