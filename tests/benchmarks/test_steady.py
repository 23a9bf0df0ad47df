from __future__ import annotations

from typing import Any

import pytest
from steady import ROWS, Turn, choose_batch, compare, judge, read_turn

COPIES = {"every": 2, "bytes": 3 << 20, "cost_s": 0.004}


def turns(on_s: float, off_s: float = 0.2, snapshots: Any = COPIES) -> dict[str, list[Turn]]:
    return {
        "on": [Turn(on_s, 110, snapshots), Turn(on_s, 110, snapshots)],
        "off": [Turn(off_s, 100, None), Turn(off_s, 100, None)],
        "torchrun": [Turn(off_s, 100, None), Turn(off_s, 100, None)],
    }


def figures(**changes: Any) -> dict[str, Any]:
    return {row: compare(turns(**{"on_s": 0.2, **changes}), 16) for row in ROWS}


def test_the_ratio_is_of_rates_and_memory_is_told() -> None:
    found = compare(turns(0.25), 16)
    assert found["ratio"]["off"]["median"] == 0.8
    assert (found["snapshot_every"], found["snapshot_bytes_per_rank"], found["snapshot_cost_ms"]) == ([2], 3 << 20, 4.0)
    assert found["resident_bytes_more"] == 10


def test_the_goal_wants_long_steps_with_copies_in_every_row() -> None:
    rows = list(ROWS)
    assert judge(figures(on_s=0.205), rows)
    assert not judge(figures(on_s=0.21), rows)
    assert not judge(figures(on_s=0.1, off_s=0.1), rows), "a short step proves nothing"
    assert not judge(figures(snapshots=None), rows), "nothing was copied"
    assert not judge(figures(), rows[:1])


def test_first_steps_do_not_count() -> None:
    lines: list[dict[str, Any]] = [
        {"event": "step", "seconds": 9.0 if number < 5 else 0.1, "memory_bytes": number} for number in range(8)
    ]
    turn = read_turn([*lines, {"event": "snapshots", **COPIES}])
    assert (turn.step_s, turn.memory_bytes) == (0.1, 7)
    assert turn.snapshots is not None
    assert turn.snapshots["every"] == 2


@pytest.mark.parametrize("step_s", [0.001, 0.02, 0.15, 1.0])
def test_a_batch_is_long_enough_and_whole(step_s: float) -> None:
    batch = choose_batch(step_s, 8)
    assert batch % 8 == 0
    assert batch / 8 * step_s >= 0.15
