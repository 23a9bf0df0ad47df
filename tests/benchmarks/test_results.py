from __future__ import annotations

import json

import pytest
from results import Spread, conclude


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(median=3.0, low=2.0, high=4.0, num=5)


def test_one_measurement_has_no_width() -> None:
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)


def test_a_spread_reads_as_words() -> None:
    assert Spread(0.99, 0.98, 1.0, 3).words(2) == "0.99 (0.98 to 1.00)"


def test_the_closing_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    conclude("overhead", {"ratio": Spread(0.98765, 0.98, 1.0, 3).fields(3)}, "at least 0.98", True)
    (line,) = capsys.readouterr().out.splitlines()
    ratio = {"median": 0.988, "low": 0.98, "high": 1.0, "num": 3}
    assert json.loads(line) == {"name": "overhead", "figures": {"ratio": ratio}, "goal": "at least 0.98", "met": True}
