"""How long does a full search over the layouts of a large model take, on one core?

The Llama of 405B parameters on 16,384 GPUs: every legal layout with its micro-batches, recompute and schedules, timed
and ranked, and the memory of the fastest. The seconds are those of the processor, so that other work on the machine
does not count; the best of several runs, each with nothing cached.

    python benchmarks/plan_search.py
    python benchmarks/plan_search.py --cluster 1024xh100 --preset 70b
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

from results import conclude, say

from closeranks.facts.cluster import parse_cluster
from closeranks.facts.layout import Layout, LayoutConstraints
from closeranks.facts.shapes.llama import PRESETS
from closeranks.facts.shapes.transformer import from_llama
from closeranks.plan.search.search import PlanQuestion, SearchResult, search_plans
from closeranks.plan.step_time.workload import PlanChoice, Workload

LIMIT_S = 3.0
GOAL = f"a full search takes less than {LIMIT_S:g} s of one core"
_SEQ_LEN = 8192


@dataclass(frozen=True, slots=True)
class TimedSearch:
    seconds: float
    result: SearchResult


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="16384xh100")
    parser.add_argument("--preset", default="405b", choices=PRESETS)
    parser.add_argument("--global-batch", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    asked = question(args.preset, args.cluster, args.global_batch)
    best = min((timed_search(asked) for _ in range(args.repeats)), key=lambda one: one.seconds)
    figures = figures_of(best)
    say(f"{args.preset} on {args.cluster}: {figures['num_choices']:,} choices of {figures['num_layouts']:,} layouts")
    say(f"  {best.seconds:.2f} s; {figures['us_per_choice']} us a choice; advised: {figures['advised']}")
    conclude("plan_search", figures, GOAL, best.seconds < LIMIT_S)


def question(preset: str, cluster: str, global_batch: int) -> PlanQuestion:
    shape = PRESETS[preset]
    needs = LayoutConstraints(
        global_batch=global_batch, micro_batch=1, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
        num_layers=shape.num_layers, vocab_size=shape.vocab_size, ffn_dim=shape.ffn_dim, seq_len=_SEQ_LEN,
    )  # fmt: skip
    workload = Workload(from_llama(shape), _SEQ_LEN, global_batch)
    return PlanQuestion(workload, needs, parse_cluster(cluster), PlanChoice(Layout()))


def timed_search(asked: PlanQuestion) -> TimedSearch:
    started = time.process_time()
    result = search_plans(asked)
    return TimedSearch(time.process_time() - started, result)


def figures_of(timed: TimedSearch) -> dict[str, Any]:
    winner = timed.result.winner
    return {
        "seconds": round(timed.seconds, 3),
        "num_choices": timed.result.num_choices,
        "num_layouts": timed.result.num_layouts,
        "us_per_choice": round(1e6 * timed.seconds / max(timed.result.num_choices, 1)),
        "advised": None if winner is None else str(winner.choice.layout),
    }


if __name__ == "__main__":
    main()
