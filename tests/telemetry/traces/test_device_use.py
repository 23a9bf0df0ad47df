"""How long devices are busy in a step, read back from the newest summary of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from closeranks.telemetry.traces.device_use import device_busy_s


def _write(folder: Path, step: int, ranks: Any) -> None:
    (folder / "traces" / f"step-{step:08d}").mkdir(parents=True)
    (folder / "traces" / f"step-{step:08d}" / "summary.json").write_text(json.dumps({"ranks": ranks}))


def test_the_newest_trace_counts(tmp_path: Path) -> None:
    assert device_busy_s(tmp_path) == {}
    _write(tmp_path, 5, [{"rank": 0, "num_steps": 1, "device": {"busy_s": 1.0}}])
    _write(tmp_path, 12, [{"rank": 0, "device": None}, {"rank": 1, "num_steps": 4, "device": {"busy_s": 3.0}}])
    assert device_busy_s(tmp_path) == {1: 0.75}


@pytest.mark.parametrize(
    "ranks",
    [
        None,
        [3],
        [{"rank": "x", "device": {"busy_s": 1}}],
        [{"rank": 0, "num_steps": 0, "device": {"busy_s": 1}}],
        [{"device": None}],
    ],
)
def test_a_damaged_summary_counts_as_none(tmp_path: Path, ranks: Any) -> None:
    _write(tmp_path, 5, ranks)
    assert device_busy_s(tmp_path) == {}
