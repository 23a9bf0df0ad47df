"""The plot of phases: layers add up to the step, bins are means, and pictures are drawn from a folder alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from closeranks.core.events import RunStarted, StepPhases, encode
from closeranks.telemetry.reports.phase_plot import LAYERS, binned, draw_phases, stacked
from closeranks.telemetry.run_log.run_folder import RunFolder

PHASES = {"forward": 0.02, "data.all_reduce": 0.01, "vote": 0.005, "data": 0.004, "my_own": 0.001}


def _step(number: int, factor: float = 1.0) -> StepPhases:
    phases = {name: factor * spent for name, spent in PHASES.items()}
    return StepPhases(number, sum(phases.values()), phases)


def test_layers_add_up_to_the_step_and_every_phase_has_one() -> None:
    layers = dict(zip((layer.label for layer in LAYERS), stacked([_step(1), _step(2)]), strict=True))
    assert sum(layers.values()) == pytest.approx(40.0)
    assert layers["waiting for ranks"] == pytest.approx(15.0)
    assert layers["data"] == pytest.approx(4.0)
    assert layers["everything else"] == pytest.approx(1.0)


def test_bins_are_means_over_steps_and_ranks() -> None:
    counted = {0: [_step(number) for number in range(1, 401)], 1: [_step(number, 3.0) for number in range(1, 401)]}
    rows = binned(counted, most=100)
    assert len(rows) == 100
    assert rows[0][0] == 2.5
    assert sum(rows[0][1]) == pytest.approx(80.0)


def _write(folder: Path, num_steps: int, num_ranks: int = 2) -> None:
    (folder / "metrics").mkdir()
    for rank in range(num_ranks):
        lines = [encode(RunStarted(world_size=num_ranks)), *(encode(_step(number + 1)) for number in range(num_steps))]
        RunFolder(folder).metrics(rank).write_text("".join(json.dumps({"at": 0.0, **line}) + "\n" for line in lines))


@pytest.mark.parametrize(("num_steps", "num_ranks"), [(2, 1), (30, 2), (300, 20)])
def test_a_picture_is_drawn_from_the_folder(tmp_path: Path, num_steps: int, num_ranks: int) -> None:
    _write(tmp_path, num_steps, num_ranks)
    drawn = draw_phases(tmp_path)
    assert drawn == tmp_path / "phases.png"
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*"))


def test_without_phases_there_is_no_picture(tmp_path: Path) -> None:
    _write(tmp_path, 0)
    assert draw_phases(tmp_path) is None
