from __future__ import annotations

from typing import Any

from large_batch import RULES, judge, rows, summarise

from closeranks.optim.config import OptimConfig
from tests.benchmarks.scripts import run_script


def figures(**means: float) -> dict[str, Any]:
    usual = {"small": 0.98, "cold": 0.5, **dict.fromkeys(RULES, 0.975), **means}
    return {"accuracy": {name: {"mean": value} for name, value in usual.items()}}


def test_the_goal_is_that_every_rule_reaches_the_small_batch_and_the_cold_start_does_not() -> None:
    assert judge(figures())
    assert not judge(figures(lars=0.969))
    assert not judge(figures(cold=0.975))
    partial = figures()
    del partial["accuracy"]["lamb"]
    assert not judge(partial), "what was not run proves nothing"


def test_every_row_is_a_job_that_can_be_asked_for() -> None:
    for name, row in rows().items():
        OptimConfig.model_validate(dict(row.optim))
        assert (row.warmup > 0) == (name in RULES)


def test_the_figures_are_the_spread_of_the_seeds() -> None:
    table = rows()
    table["small"].accuracies.extend([0.97, 0.99, 0.98])
    found = summarise(table, 47.123, 15)
    assert found["accuracy"] == {
        "small": {"batch": 16, "mean": 0.98, "median": 0.98, "low": 0.975, "high": 0.985, "num": 3}
    }
    assert found["noise_scale"] == 47.1


def test_it_runs() -> None:
    found = run_script("large_batch.py", "--seeds", "1", "--epochs", "0.2", "--rows", "lamb", "cold")
    assert set(found["figures"]["accuracy"]) == {"lamb", "cold"}
    assert found["met"] is False
