from __future__ import annotations

import json

from plan_search import JOB, LIMIT_S, timed

from tests.benchmarks.scripts import run_script


def test_16384_gpus_are_searched_in_time() -> None:
    """Seconds of the processor; twice the limit leaves room for a slower one."""
    search = timed(str(JOB), "model.preset=405b", "train.global_batch=16384", "--cluster", "16384xh100", "--json")
    found = json.loads(search.out)
    assert found["num_choices"] > 3000
    assert found["advised"] is not None
    assert 0.1 < search.seconds < 2 * LIMIT_S


def test_the_script_ends_with_its_figures() -> None:
    words = ("--cluster", "16xh100", "--preset", "8b", "--global-batch", "64", "128", "--repeats", "1")
    closing = run_script("plan_search.py", *words)
    assert closing["name"] == "plan_search"
    assert closing["met"] is (closing["figures"]["seconds"] < LIMIT_S)
    assert [search["global_batch"] for search in closing["figures"]["searches"]] == [64, 128]
