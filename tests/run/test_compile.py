"""A compiled model learns what an eager one does, to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.run.trajectories import alone, largest_difference, relative

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    # the compiler touches all of torch and every tensor's every attribute, and torch warns it of both
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_compiled_equals_eager(tmp_path: Path, precision: str) -> None:
    def trained(compiled: bool) -> Any:
        table = {"precision": precision, "compile": compiled, "steps": 4, "global_batch": 4, "micro_batch": 2}
        return alone(tmp_path / str(compiled), {"train": table, "telemetry": {"report": False}})

    eager, compiled = trained(False), trained(True)
    tolerance = 1e-5 if precision == "float32" else 1e-11
    assert relative(compiled.losses, eager.losses) < tolerance
    assert largest_difference(compiled.gradients, eager.gradients) < 10 * tolerance
    assert list(compiled.weights) == list(eager.weights), "names are the same, so a state can be shared"
    assert eager.losses[-1] < eager.losses[0]
