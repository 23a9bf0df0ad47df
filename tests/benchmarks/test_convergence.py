from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from convergence import EXACT, GAPS, KINDS, SPREADS, TASKS, comparison, judge

from closeranks.lab.compare.comparison_plan import make_plan
from closeranks.lab.compare.config import load_compare
from tests.benchmarks.scripts import run_script


def figures() -> dict[str, Any]:
    digits = {kind: {"accuracy": 0.98, "gap": 0.0} for kind in (EXACT, *KINDS)}
    text = {kind: {"loss": 2.5, "gap": GAPS.get(kind, 0.0)} for kind in (EXACT, *KINDS)}
    rows = {"digits": digits, "text": text}
    return {f"{name}, {spread}": deepcopy(rows[name]) for name in TASKS for spread in SPREADS}


def test_every_kind_has_to_learn_on_every_task_and_spread() -> None:
    assert judge(figures())
    short = figures()
    short["digits, sharded"]["topk"]["accuracy"] = 0.969
    assert not judge(short)
    far = figures()
    far["text, replicas"]["powersgd"]["gap"] += 0.01
    assert not judge(far)
    partial = figures()
    del partial["text, sharded"]["diloco"]
    assert not judge(partial), "what was not run proves nothing"


def test_every_kind_has_a_gap_it_must_keep() -> None:
    assert GAPS.keys() == KINDS.keys()


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("spread", SPREADS)
def test_every_comparison_can_be_run(tmp_path: Path, name: str, spread: str) -> None:
    path = tmp_path / "compare.toml"
    path.write_text(comparison(TASKS[name], spread, list(KINDS), is_short=False))
    cases = {case.name: case for case in make_plan(load_compare(path), path).cases}
    assert list(cases) == [EXACT, *KINDS]
    assert {case.job.layout.zero for case in cases.values()} == {3 if spread == "sharded" else 0}
    assert cases["diloco"].num_workers == (4 if spread == "sharded" else 2)
    assert cases["topk"].job.sync.compress.name == "topk"


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    found = run_script("convergence.py", "--short", "--only", "digits", "--kinds", "int8", "--folder", str(tmp_path))
    assert found["met"] is False, "half an epoch proves nothing"
    assert set(found["figures"]) == {"digits, replicas", "digits, sharded"}
