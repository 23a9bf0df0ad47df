from __future__ import annotations

from startup import judge, summarise

from tests.benchmarks.scripts import run_script

SECONDS = {
    "python": [0.02, 0.01, 0.03],
    "import": [0.05, 0.06, 0.04],
    "help": [0.2, 0.1, 0.25],
    "plan help": [0.2, 0.1, 0.25],
    "config": [0.4, 0.3, 0.45],
}


def test_best_and_median_are_told_and_the_import_is_charged_beyond_python() -> None:
    figures = summarise(SECONDS)
    assert figures["help"] == {"best_s": 0.1, "median_s": 0.2, "runs": 3}
    assert figures["import"]["beyond_python_s"] == 0.03
    assert judge(figures)


def test_one_slow_command_fails_the_goal() -> None:
    assert not judge(summarise({**SECONDS, "help": [0.31, 0.32, 0.2]}))
    assert not judge(summarise({**SECONDS, "import": [0.13, 0.13, 0.13]}))


def test_it_runs() -> None:
    figures = run_script("startup.py", "--runs", "1")["figures"]
    assert set(figures) == {"python", "import", "help", "plan help", "config"}
    assert 0 < figures["python"]["best_s"] < figures["config"]["best_s"]
