import gzip
import json
from pathlib import Path

import pytest
import torch

from closeranks.core.events import Event, Warned
from closeranks.telemetry import profiler as profilers
from closeranks.telemetry.profiler import StepProfiler, StepRange
from tests.checkpoint.test_write_faults import tmpfs

from .full import fill, needs_root


def names_in(path: Path) -> list[str]:
    with gzip.open(path, "rt") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def test_the_steps_of_the_window_are_traced(tmp_path: Path) -> None:
    profiler = StepProfiler(StepRange(2, 3), tmp_path, rank=0)
    path = tmp_path / "traces" / "rank-00000.json.gz"
    for number in range(1, 6):
        profiler.step_begin(number)
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        profiler.step_end(number)
        assert path.exists() == (number >= 3)
    profiler.close()
    names = names_in(path)
    assert names.count("aten::mm") == 2
    assert {"step 2", "step 3"} <= set(names)
    assert not {"step 1", "step 4"} & set(names)
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_a_run_that_ends_inside_the_window_keeps_its_trace(tmp_path: Path) -> None:
    profiler = StepProfiler(StepRange(1, 100), tmp_path, rank=7)
    profiler.step_begin(1)
    torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    profiler.close()
    profiler.close()
    assert "aten::mm" in names_in(tmp_path / "traces" / "rank-00007.json.gz")


def test_outside_the_window_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profilers, "profile", None)
    monkeypatch.setattr(profilers, "record_function", None)
    profiler = StepProfiler(StepRange(5, 6), tmp_path, rank=0)
    for number in (1, 4, 7):
        profiler.step_begin(number)
        profiler.step_end(number)
    profiler.close()
    assert not (tmp_path / "traces").exists()


@needs_root
def test_a_trace_that_finds_no_room_is_told_and_ends_nothing(tmp_path: Path) -> None:
    told: list[Event] = []
    with tmpfs(tmp_path / "disk", "64k") as place:
        profiler = StepProfiler(StepRange(1, 1), place, 0, told.append)
        filler = fill(place)
        profiler.step_begin(1)
        torch.ones(4).sum()
        profiler.step_end(1)
        profiler.close()
        (warned,) = told
        assert isinstance(warned, Warned)
        assert "rank-00000.json.gz was not written: No space left on device" in warned.what
        assert list(place.rglob("*.gz")) == []
        filler.unlink()
