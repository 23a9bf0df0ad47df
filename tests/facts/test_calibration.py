"""What was measured comes back as measured; between measured shapes times lie between theirs; a file survives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import UserError
from closeranks.facts.calibration import (
    AttentionTime,
    Calibration,
    CollectiveTime,
    MemoryPassTime,
    OptimizerTime,
    ProductTime,
    WorkerSlowdown,
    calibration_text,
    load_calibration,
)

PEAK, FIXED_S = 1e11, 1e-5
SIZES = (64, 256, 1024)


def _seconds(m: int, n: int, k: int) -> float:
    """A device with a fixed cost and a rate."""
    return FIXED_S + 2.0 * m * n * k / PEAK


CALIBRATION = Calibration(
    device="a test",
    num_cores=2,
    versions={"torch": "2.13"},
    products=tuple(ProductTime("fp32", m, n, k, _seconds(m, n, k)) for m in SIZES for n in SIZES for k in SIZES),
    attention=(AttentionTime("fp32", 2, 4, 64, 32, 1e-4, 3e-4), AttentionTime("fp32", 2, 4, 256, 32, 1e-3, 3e-3)),
    memory_passes=(MemoryPassTime(1 << 20, 1e-4), MemoryPassTime(1 << 24, 3.2e-3)),
    optimizer=(OptimizerTime(1_000_000, 2e-3),),
    collectives=(CollectiveTime("all-reduce", 2, 1000, 1e-3), CollectiveTime("all-reduce", 4, 1000, 3e-3)),
    slowdowns=(WorkerSlowdown(1, 0.5, 0.6), WorkerSlowdown(2, 1.0, 1.2), WorkerSlowdown(4, 2.0, 2.4)),
    disk_bytes_per_s=1e9,
    step_overhead_s=1e-3,
    corrections={"optimizer": 1.25},
)


def test_a_measured_shape_takes_what_was_measured() -> None:
    for one in CALIBRATION.products:
        assert CALIBRATION.product_s(one.m, one.n, one.k, "fp32") == one.seconds
    assert CALIBRATION.attention_s(2, 4, 256, 32, "fp32") == 1e-3
    assert CALIBRATION.attention_s(2, 4, 256, 32, "fp32", backward=True) == 3e-3
    assert CALIBRATION.memory_s(1 << 24) == 3.2e-3


@given(*[st.integers(32, 4096)] * 3)
def test_a_shape_between_measured_ones_is_near_the_truth(m: int, n: int, k: int) -> None:
    found = CALIBRATION.product_s(m, n, k, "fp32")
    assert found == pytest.approx(_seconds(m, n, k), rel=0.15)


def test_what_was_not_measured_is_unknown() -> None:
    assert CALIBRATION.product_s(64, 64, 64, "bf16") is None
    assert CALIBRATION.collective_s("all-gather", 2, 1000) is None
    assert CALIBRATION.collective_s("all-reduce", 8, 1000) is None, "more ranks than were measured"
    empty = Calibration()
    assert empty.memory_s(10) is empty.optimizer_s(10) is empty.product_s(1, 1, 1, "fp32") is None
    assert empty.slowdown(4) == WorkerSlowdown(4)
    assert empty.correction("optimizer") == 1.0


def test_sizes_between_and_beyond() -> None:
    middle = CALIBRATION.memory_s(1 << 22)
    assert middle is not None
    assert 1e-4 < middle < 3.2e-3
    assert CALIBRATION.memory_s(1 << 25) == pytest.approx(6.4e-3), "the rate of the largest"
    assert CALIBRATION.memory_s(10) == 1e-4, "the time of the smallest"
    assert CALIBRATION.optimizer_s(3_000_000) == pytest.approx(6e-3)
    assert CALIBRATION.collective_s("all-reduce", 3, 1000) == 3e-3, "the next larger number of ranks"
    assert CALIBRATION.collective_s("all-reduce", 1, 1000) == 0


def test_workers_compete_for_cores() -> None:
    assert CALIBRATION.slowdown(1).products == 0.5
    assert CALIBRATION.slowdown(3).products == pytest.approx(1.5)
    assert CALIBRATION.slowdown(8) == WorkerSlowdown(8, 4.0, 4.8)


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(calibration_text(CALIBRATION))
    assert load_calibration(path) == CALIBRATION
    path.write_text(calibration_text(Calibration()))
    assert load_calibration(path) == Calibration()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"format": 99}, "its format is 99"),
        ({"products": 3}, "products must be a list"),
        ({"products": [{"precision": "fp32", "m": 1, "n": 1, "k": 1, "seconds": 0}]}, "products, seconds is 0"),
        ({"optimizer": [{"num_params": 5, "seconds": 1e9}]}, "optimizer, seconds is 1e.09"),
        ({"memory_passes": [{"num_bytes": 5, "seconds": float("nan")}]}, "seconds is nan"),
        ({"products": [{"precision": "fp32", "m": "1"}]}, "m of ProductTime"),
        ({"memory_passes": [{"num_bytes": 5}]}, "seconds"),
        ({"disk_bytes_per_s": -1}, "its disk_bytes_per_s is -1"),
        ({"step_overhead_s": float("nan")}, "its step_overhead_s is nan"),
        ({"corrections": {"optimizer": float("inf")}}, "its optimizer is inf"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path: Path, change: dict[str, object], what: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**json.loads(calibration_text(CALIBRATION)), **change}))
    with pytest.raises(UserError, match=what):
        load_calibration(path)


def test_no_file_and_no_json_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_calibration(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(UserError, match="cannot be used"):
        load_calibration(tmp_path / "text.json")
