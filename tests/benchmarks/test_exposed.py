from __future__ import annotations

import pytest
from exposed import Turn, compare, is_met
from exposed_lane import Shipment, busy_s

from tests.benchmarks.scripts import run_script


def turn(step_s: float, exposed_s: float, busy: float) -> Turn:
    """Two ranks and two steps, apart by a tenth in the one and the other direction."""
    figures = {"step_s": step_s, "exposed_s": exposed_s, "busy_s": busy}
    return [{name: [value * part, value * (2 - part)] for name, value in figures.items()} for part in (0.9, 1.0)]


def test_what_is_saved_is_compared_with_what_is_no_longer_exposed() -> None:
    rounds = {
        "off": [turn(1.0, 0.49, 0.5), turn(1.2, 0.5, 0.5)],
        "on": [turn(0.7, 0.2, 0.5), turn(0.9, 0.2, 0.5)],
    }
    figures = compare(rounds)
    assert figures["step_ms"]["off"]["median"] == 1100.0
    assert figures["exposed_to_busy"]["median"] == 0.99
    assert (figures["saved_ms"]["median"], figures["hidden_ms"]["median"]) == (300.0, 295.0)
    assert figures["gap_to_busy"]["median"] == 0.01
    assert is_met(figures)
    assert not is_met(compare({**rounds, "on": rounds["off"], "off": [turn(1.2, 0.4, 0.5)] * 2}))


def test_the_link_is_busy_while_anything_is_under_way() -> None:
    times = [(1.0, 2.0), (1.1, 3.0), (5.0, 6.0), (5.5, 5.7)]
    assert busy_s(Shipment(None, 0, handed, arrived) for handed, arrived in times) == pytest.approx(3.0)


@pytest.mark.world
@pytest.mark.slow
def test_it_measures_and_concludes() -> None:
    found = run_script("exposed.py", "--rounds", "3", "--block", "6", "--batch", "2", "--rate-mb", "30")
    figures = found["figures"]
    assert figures["exposed_to_busy"]["median"] == pytest.approx(1.0, abs=0.1)
    assert figures["saved_ms"]["median"] > 0
    assert figures["hidden_ms"]["median"] > 0
    assert figures["gap_to_busy"]["num"] == 3
