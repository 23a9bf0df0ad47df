"""Runs that are over, as values, and the tables they come to."""

from __future__ import annotations

from typing import Any

from closeranks.cli.compare.config import Budget, Compare, Setting, Target
from closeranks.cli.compare.reading import FINISHED, Outcome
from closeranks.cli.compare.table import Table, make_table

TARGET = Target(value=2.0)


def runs(setting: str, *to_target: float | None, finals: tuple[float, ...] = (), **more: Any) -> list[Outcome]:
    """One run for each time; the final losses differ by seed."""
    finals = finals or tuple(1.9 + 0.1 * seed for seed in range(len(to_target)))
    return [
        Outcome(setting, seed, 0, **{"num_workers": 2, "state": FINISHED, "seconds": 100.0, "steps_per_s": 2.0, **more},
                seconds_to_target=at_s, final_loss=final)
        for seed, (at_s, final) in enumerate(zip(to_target, finals, strict=True))
    ]  # fmt: skip


def compared(*groups: list[Outcome], target: Target | None = TARGET, budget: Budget | None = None) -> Table:
    settings = tuple(Setting(name=group[0].setting) for group in groups)
    compare = Compare(job="job.toml", setting=settings, target=target, budget=budget or Budget())
    return make_table(compare, [one for group in groups for one in group])
