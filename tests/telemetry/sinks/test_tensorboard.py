import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from closeranks.core.errors import SetupError
from closeranks.core.events import Evaluated, Event, Warned
from closeranks.telemetry.sinks import tensorboard
from closeranks.telemetry.sinks.tensorboard import TensorBoardSink
from tests.checkpoint.test_write_faults import tmpfs
from tests.telemetry.conftest import CPU, step
from tests.telemetry.full import fill, needs_root


def opened(folder: Path, emit: Callable[[Event], None] = lambda event: None) -> TensorBoardSink:
    sink = TensorBoardSink(folder, emit)
    sink.open()
    return sink


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader: Any = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_scalars_stand_under_their_steps(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.handle([replace(CPU, datasheet_flops=1e12)])
    for number in (1, 2, 3):
        sink.handle([step(number, loss=float(number), metrics={"accuracy": 0.5})])
    sink.handle([step(4, loss=math.nan)])
    sink.handle([Evaluated(step=3, loss=1.5, metrics={"accuracy": 0.75})])
    sink.close()
    written = scalars(tmp_path)
    assert set(written) == {
        "train/loss", "train/lr", "train/grad_norm", "train/items_per_s", "train/mfu", "train/accuracy", "eval/loss",
        "eval/accuracy",
    }  # fmt: skip
    assert written["train/loss"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert written["train/items_per_s"] == [(n, pytest.approx(10_000)) for n in (2, 3, 4)]
    assert written["eval/accuracy"] == [(3, 0.75)]


def test_a_run_that_went_back_is_shown_once(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.handle([CPU])
    for number in range(1, 9):
        first.handle([step(number, loss=9.0)])
    first.close()
    again = opened(tmp_path)
    again.handle([replace(CPU, generation=1, first_step=5)])
    for number in range(6, 11):
        again.handle([step(number, loss=1.0)])
    again.close()
    assert scalars(tmp_path)["train/loss"] == [(n, 9.0) for n in range(1, 6)] + [(n, 1.0) for n in range(6, 11)]


def test_a_missing_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SetupError, match=r"pip install closeranks\[track\]"):
        TensorBoardSink(tmp_path).open()


@needs_root
def test_a_full_disk_is_told_once_and_a_new_file_is_begun_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "_RETRY_S", 0.0)
    told: list[Event] = []
    with tmpfs(tmp_path / "disk", "512k") as place:
        sink = opened(place, told.append)
        sink.handle([CPU])
        sink.handle([step(1, loss=1.0)])
        filler = fill(place)
        number = 2
        while not told:  # its writer fills a buffer, and a queue behind that
            sink.handle([step(number, loss=1.0)])
            number += 1
        for _ in range(100):
            sink.handle([step(number, loss=1.0)])
        assert len(list((place / "tensorboard").iterdir())) == 1, "nothing is begun in vain"
        filler.unlink()
        sink.handle([step(number + 1, loss=2.0)])
        sink.close()
        assert (number + 1, 2.0) in scalars(place)["train/loss"]
    assert told == [Warned("TensorBoard scalars cannot be written: No space left on device")]
