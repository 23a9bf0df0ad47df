"""What a run folder lacks is said; a folder that lacks nothing has no sentence."""

from __future__ import annotations

import pytest

from closeranks.telemetry.run_log.gaps import damaged_lines, lacking_phases, lacking_ranks, lacking_steps


@pytest.mark.parametrize(
    ("steps", "began_after", "num_generations", "said"),
    [
        (range(1, 61), 0, 1, ""),
        (range(21, 61), 20, 1, ""),
        ([*range(1, 30), *range(32, 61)], 0, 2, ""),
        ([*range(1, 30), *range(35, 61)], 0, 2, "5 of 60 steps"),
        (range(21, 61), 0, 1, "20 of 60 steps"),
        ([], 0, 1, ""),
        (range(30, 61), None, 0, "how the run began"),
    ],
    ids=["whole", "resumed", "a fault", "more than a fault", "no beginning", "none yet", "no record of the start"],
)
def test_steps_that_rank_0_did_not_record(
    steps: range | list[int], began_after: int | None, num_generations: int, said: str
) -> None:
    found = list(lacking_steps(steps, began_after, num_generations))
    assert len(found) == bool(said)
    assert all(said in one for one in found)


def test_ranks_that_recorded_less_than_the_others() -> None:
    assert not list(lacking_phases({0: range(60), 1: range(58)}, 1))
    (found,) = lacking_phases({0: range(60), 1: range(40)}, 1)
    assert found.startswith("rank 1 lacks")
    assert "20 of 60 steps" in found
    assert not list(lacking_ranks(2, 2))
    assert list(lacking_ranks(1, 2)) == ["the metrics of 1 of 2 ranks are not in this folder"]


def test_damaged_lines_are_counted() -> None:
    assert not list(damaged_lines("it", 0))
    assert list(damaged_lines("it", 1)) == ["1 line of it is damaged and left out"]
    assert list(damaged_lines("it", 2)) == ["2 lines of it are damaged and left out"]
