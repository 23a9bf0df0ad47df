"""Does a run under faults at random seconds survive them all, come out the same, and hold no more than before?

Steps mostly wait, as for a device, so that the run without faults, which does not, is short. How many steps were made
is told, not demanded: others may use the machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.scripts import run_script

NUM_FAULTS = 7


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out: Path = tmp_path_factory.mktemp("faults") / "soak"
    options = ["--mix", "light", "--minutes", "3", "--seed", "3", "--batch", "8", "--waiting", "--out", str(out)]
    closing = run_script("soak.py", *options, timeout_s=540)
    found: dict[str, Any] = closing["figures"]
    made = found["throughput"]
    print(f"{made['ratio']:.1%} of undisturbed steps (calms {made['calm_spread']:.1%} apart); {found['kinds']}")
    return found


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.timeout(560)
class TestThreeMinutes:
    def test_every_fault_is_survived(self, figures: dict[str, Any]) -> None:
        assert figures["faults"] == {"planned": NUM_FAULTS, "struck": NUM_FAULTS, "survived": NUM_FAULTS}
        assert set(figures["kinds"]) == {"kill", "exception", "term"}

    def test_nothing_diverges(self, figures: dict[str, Any]) -> None:
        same = figures["divergence"]
        assert (same["losses_equal"], same["samples_equal"], same["state"]) == (True, True, "")
        assert same["steps"] > 50, "too few steps to say anything"

    def test_at_most_one_step_is_done_again(self, figures: dict[str, Any]) -> None:
        redone = [row["most_redone"] for row in figures["kinds"].values() if row["most_redone"] is not None]
        assert redone
        assert max(redone) <= 1

    def test_nothing_leaks_and_nothing_is_left(self, figures: dict[str, Any]) -> None:
        assert figures["left_over"] == []
        assert [name for name, held in figures["growth"].items() if held["is_leak"]] == []
