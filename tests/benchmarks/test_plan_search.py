from __future__ import annotations

from plan_search import LIMIT_S, question, timed_search

from tests.benchmarks.scripts import run_script


def test_16384_gpus_are_searched_in_time() -> None:
    """Seconds of the processor; twice the limit leaves room for a slower one."""
    timed = timed_search(question("405b", "16384xh100", 2048))
    assert timed.result.num_choices > 3000
    assert timed.result.winner is not None
    assert timed.result.winner.choice.layout.num_ranks == 16384
    assert timed.seconds < 2 * LIMIT_S


def test_the_script_ends_with_its_figures() -> None:
    closing = run_script("plan_search.py", "--cluster", "16xh100", "--preset", "8b", "--repeats", "1")
    assert closing["name"] == "plan_search"
    assert closing["met"] is (closing["figures"]["seconds"] < LIMIT_S)
