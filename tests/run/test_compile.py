"""A compiled model learns what an eager one does, to rounding."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from closeranks import Hook, Session
from closeranks.core.events import StepDone
from closeranks.run.job.job import load_job
from closeranks.run.loop import run_session
from closeranks.testing import run_world
from tests.run.trajectories import alone, largest_difference, merged, relative

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


@pytest.mark.world
@pytest.mark.parametrize(
    ("layout", "recompute"),
    [("data=2 zero=3", "none"), ("tensor=2", "selective"), ("pipeline=2", "full"), ("pipeline=2 schedule=zbv", "none")],
)
def test_compiled_under_a_layout_equals_eager_in_one_process(tmp_path: Path, layout: str, recompute: str) -> None:
    axes = dict(pair.split("=") for pair in layout.split())
    tables: dict[str, Any] = {
        "model": {"num_layers": 4},
        "train": {"precision": "float64", "steps": 3, "global_batch": 4, "micro_batch": 2},
    }
    eager = alone(tmp_path / "eager", tables)
    tables["train"] |= {"compile": True, "recompute": recompute}
    tables["layout"] = {name: value if name == "schedule" else int(value) for name, value in axes.items()}
    for compiled in run_world(trained_losses, 2, tmp_path / "compiled", tables, timeout_s=380):
        assert relative(compiled, eager.losses) < 1e-11


def trained_losses(folder: Path, tables: dict[str, Any]) -> list[float]:
    warnings.simplefilter("ignore")
    job = load_job(None, extra=merged({**tables, "telemetry": {"report": False}})).value
    losses: list[float] = []

    class Note(Hook):
        def on_step(self, session: Session, step: StepDone) -> None:
            losses.append(step.loss)

    run_session(Session.from_job(job, folder, [Note()]))
    return losses
