import math
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.core.events import RunEnded
from closeranks.telemetry.picture import draw
from closeranks.telemetry.recorder import Recorder

from .conftest import CPU, step


def size_of(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_a_run_is_drawn_and_nothing_else_is_left(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    path = draw(folder)
    assert path == folder / "curve.png"
    assert size_of(path) == (1536, 960)
    assert not list(folder.glob(".*"))


def test_a_run_without_steps_has_no_picture(make_run: Callable[..., Path], tmp_path: Path) -> None:
    assert draw(make_run(num_steps=0, reason="failed")) is None
    assert draw(tmp_path / "nowhere") is None


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_run_that_died_young_is_drawn(make_run: Callable[..., Path], num_steps: int) -> None:
    assert draw(make_run(num_steps=num_steps, reason="")) is not None


def test_values_that_are_not_finite_skips_and_restarts_are_drawn(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0)
    recorder.emit(CPU)
    for number in range(1, 30):
        taken = number % 7 != 0
        recorder.emit(step(number, taken=taken, loss=1e-4 * number if taken else math.nan, grad_norm=math.inf))
    recorder.emit(replace(CPU, generation=1, first_step=20))
    recorder.emit(step(21))
    recorder.emit(RunEnded(21))
    recorder.close()
    assert draw(tmp_path) is not None


def test_a_run_that_took_no_step_is_drawn(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0)
    for number in range(1, 4):
        recorder.emit(step(number, taken=False, loss=math.nan, grad_norm=math.nan))
    recorder.close()
    assert draw(tmp_path) is not None


def test_neither_torch_nor_matplotlib_nor_numpy_is_imported_before_a_picture_is_drawn() -> None:
    program = (
        "import sys\n"
        "from closeranks.telemetry import config, curves, folder, history, lines, memory, meter\n"
        "from closeranks.telemetry import picture, progress, recorder, report, window, wording\n"
        "print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
