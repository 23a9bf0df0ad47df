"""Runs that are over, as values, and the tables they come to."""

from __future__ import annotations

from typing import Any

from closeranks.lab.compare.config import CompareConfig, ComparisonBudget, ComparisonSetting, ComparisonTarget
from closeranks.lab.compare.result_table import ResultTable, make_table
from closeranks.lab.compare.run_outcome import FINISHED, ComparisonRunOutcome

TARGET = ComparisonTarget(value=2.0)


def runs(
    setting: str, *to_target: float | None, finals: tuple[float, ...] = (), **more: Any
) -> list[ComparisonRunOutcome]:
    """One run for each time; the final losses differ by seed."""
    finals = finals or tuple(1.9 + 0.1 * seed for seed in range(len(to_target)))
    settings = {"num_workers": 2, "state": FINISHED, "seconds": 100.0, "steps_per_s": 2.0, **more}
    return [
        ComparisonRunOutcome(setting, seed, 0, **settings, seconds_to_target=at_s, final_loss=final)
        for seed, (at_s, final) in enumerate(zip(to_target, finals, strict=True))
    ]


def compared(
    *groups: list[ComparisonRunOutcome],
    target: ComparisonTarget | None = TARGET,
    budget: ComparisonBudget | None = None,
) -> ResultTable:
    settings = tuple(ComparisonSetting(name=group[0].setting) for group in groups)
    compare = CompareConfig(job="job.toml", setting=settings, target=target, budget=budget or ComparisonBudget())
    return make_table(compare, [one for group in groups for one in group])
