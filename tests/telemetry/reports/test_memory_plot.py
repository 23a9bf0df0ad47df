"""The picture of memory: layers add up to the memory in use, and every rank has a bar as long as its peak."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.core.events import MemoryUsed, RunEnded
from closeranks.telemetry.reports.memory_plot import _figure, draw_memory, layers_over_steps, memory_rows
from closeranks.telemetry.run_log.recorder import EventRecorder
from closeranks.telemetry.run_log.resource_history import load_resources
from closeranks.telemetry.run_log.run_history import load_history
from tests.telemetry.conftest import CPU, step
from tests.telemetry.run_log.long_run import small_blocks

MIB = 1 << 20
KINDS = {"parameters": 100 * MIB, "gradients": 100 * MIB, "optimizer": 200 * MIB, "snapshots": 300 * MIB}


def record(folder: Path, num_ranks: int = 3, num_steps: int = 40) -> None:
    """Rank r has a peak of 500 + 10 r MiB; averaged weights come in at the end."""
    for rank in range(num_ranks):
        recorder = EventRecorder(folder, rank)
        recorder.emit(CPU)
        peak = (500 + 10 * rank) * MIB
        for number in range(1, num_steps + 1):
            recorder.emit(step(number, memory_bytes=450 * MIB if number < 20 else peak))
            if number == 2:
                recorder.emit(MemoryUsed(2, KINDS, 450 * MIB, 2048 * MIB))
        recorder.emit(MemoryUsed(num_steps, {**KINDS, "buffers": 50 * MIB}, peak, 2048 * MIB))
        recorder.emit(RunEnded(num_steps))
        recorder.close()


def test_layers_add_up_to_the_memory_in_use(tmp_path: Path) -> None:
    record(tmp_path)
    history, resources = load_history(tmp_path), load_resources(tmp_path)
    steps, layers = layers_over_steps(history, resources.measured[0])
    assert steps == list(range(1, 41))
    assert list(layers) == ["parameters", "gradients", "optimizer", "buffers", "rest"], "snapshots are on the host"
    totals = [sum(values[place] for values in layers.values()) for place in range(40)]
    assert totals == [450 * MIB] * 19 + [500 * MIB] * 21
    assert layers["buffers"] == [0.0] * 39 + [50 * MIB]
    assert layers["optimizer"] == [200 * MIB] * 40


def test_every_rank_has_a_bar_as_long_as_its_peak(tmp_path: Path) -> None:
    record(tmp_path)
    rows = memory_rows(load_resources(tmp_path))
    assert [row.peak_bytes for row in rows] == [500 * MIB, 510 * MIB, 520 * MIB]
    for row in rows:
        assert sum(row.kinds.values()) == row.peak_bytes
        assert row.snapshot_bytes == 300 * MIB
    above, below = _figure(load_resources(tmp_path), load_history(tmp_path)).axes
    assert [label.get_text() for label in below.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert [text.get_text() for text in below.texts] == ["500 MiB", "510 MiB", "520 MiB"]
    bars = {bar.get_label(): [patch.get_width() for patch in bar] for bar in below.containers}
    assert bars["rest"] == [50 * MIB, 60 * MIB, 70 * MIB]
    assert bars["snapshots"] == [300 * MIB] * 3
    assert above.get_title(loc="left") == "memory of rank 0, by kind"
    assert above.get_title(loc="right") == "of 2.0 GiB"


def test_of_many_ranks_those_that_use_most_are_drawn(tmp_path: Path) -> None:
    record(tmp_path, num_ranks=20, num_steps=3)
    _, below = _figure(load_resources(tmp_path), load_history(tmp_path)).axes
    assert [label.get_text() for label in below.get_yticklabels()] == [f"rank {rank}" for rank in range(4, 20)]
    assert "the 16 of 20 ranks that use most" in below.get_title(loc="left")


def test_a_long_run_is_drawn_from_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    record(tmp_path, num_ranks=1, num_steps=9000)
    history = load_history(tmp_path)
    assert len(history.steps) < 2000
    steps, layers = layers_over_steps(history, load_resources(tmp_path).measured[0])
    assert len(steps) <= 400
    assert steps[-1] == 9000
    assert sum(values[-1] for values in layers.values()) == 500 * MIB


@pytest.mark.parametrize(("num_ranks", "num_steps"), [(1, 1), (2, 2), (20, 40)])
def test_a_picture_is_drawn_from_the_folder(tmp_path: Path, num_ranks: int, num_steps: int) -> None:
    record(tmp_path, num_ranks, num_steps)
    drawn = draw_memory(tmp_path)
    assert drawn == tmp_path / "memory.png"
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*"))


def test_without_measurements_there_is_no_picture(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, 0)
    recorder.emit(step(1))
    recorder.close()
    assert draw_memory(tmp_path) is None
    assert draw_memory(tmp_path / "nowhere") is None
