import math
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.core.events import Evaluated, RankLost, RanksClosed, RunEnded
from closeranks.telemetry.reports.run_plot import _figure, draw_run
from closeranks.telemetry.run_log.recorder import AGENT, EventRecorder
from closeranks.telemetry.run_log.run_history import load_history
from tests.telemetry.conftest import CPU, step


def size_of(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_a_run_is_drawn_and_nothing_else_is_left(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    path = draw_run(folder)
    assert path == folder / "curve.png"
    assert size_of(path) == (1536, 960)
    assert not list(folder.glob(".*"))


def test_a_run_without_steps_has_no_picture(make_run: Callable[..., Path], tmp_path: Path) -> None:
    assert draw_run(make_run(num_steps=0, reason="failed")) is None
    assert draw_run(tmp_path / "nowhere") is None


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_run_that_died_young_is_drawn(make_run: Callable[..., Path], num_steps: int) -> None:
    assert draw_run(make_run(num_steps=num_steps, reason="")) is not None


def test_values_that_are_not_finite_skips_and_restarts_are_drawn(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, 0)
    recorder.emit(CPU)
    for number in range(1, 30):
        taken = number % 7 != 0
        recorder.emit(step(number, taken=taken, loss=1e-4 * number if taken else math.nan, grad_norm=math.inf))
    recorder.emit(replace(CPU, generation=1, first_step=20))
    recorder.emit(step(21))
    recorder.emit(RunEnded(21))
    recorder.close()
    assert draw_run(tmp_path) is not None


def test_a_run_that_took_no_step_is_drawn(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, 0)
    for number in range(1, 4):
        recorder.emit(step(number, taken=False, loss=math.nan, grad_norm=math.nan))
    recorder.close()
    assert draw_run(tmp_path) is not None


def test_neither_torch_nor_matplotlib_nor_numpy_is_imported_before_a_picture_is_drawn() -> None:
    program = (
        "import sys\n"
        "import pkgutil\n"
        "from importlib import import_module\n"
        "from closeranks.telemetry import config, formatting, live, reports, run_log\n"
        "for package in (live, reports, run_log):\n"
        "    for module in pkgutil.iter_modules(package.__path__, f'{package.__name__}.'): import_module(module.name)\n"
        "print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_faults_are_marked_and_the_curve_is_unbroken(make_run: Callable[..., Path]) -> None:
    folder = make_run(num_steps=20, reason="")
    recorder, agent = EventRecorder(folder, 0), EventRecorder(folder, AGENT)
    recorder.emit(replace(CPU, generation=1, first_step=18))
    for number in range(19, 41):
        recorder.emit(step(number))
    agent.emit(RankLost(0, 1, "", 20, "killed"))
    agent.emit(RanksClosed(1, 19, 0.9, 1, 2))
    agent.emit(RankLost(1, 0, "", None, "zygote"))
    recorder.close()
    agent.close()
    loss = _figure(load_history(folder), "demo").axes[0]
    drawn = {line.get_label(): line for line in loss.get_lines()}
    assert list(drawn["2 faults"].get_xdata()) == [20, 1]
    assert {text.get_text() for text in loss.texts} == {"gen 1", "gen 2"}, "and no word of going on from a step"
    curve = drawn["training, smoothed"]
    assert list(curve.get_xdata()) == list(range(1, 41))
    assert all(math.isfinite(value) for value in curve.get_ydata())
    assert draw_run(folder) is not None


def test_a_run_of_many_faults_names_only_as_many_as_there_is_room_for(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    agent = EventRecorder(folder, AGENT)
    for generation in range(40):
        agent.emit(RankLost(generation, 1, "", generation, "killed"))
        agent.emit(RanksClosed(generation + 1, generation, 0.9, 1, 2))
    agent.close()
    loss = _figure(load_history(folder), "demo").axes[0]
    assert len(loss.texts) <= 17
    assert "40 faults, ranks closed" in [line.get_label() for line in loss.get_lines()]


def test_faults_of_a_run_that_took_no_step_are_no_hindrance(tmp_path: Path) -> None:
    recorder, agent = EventRecorder(tmp_path, 0), EventRecorder(tmp_path, AGENT)
    recorder.emit(step(1, taken=False, loss=math.nan))
    agent.emit(RankLost(0, 1, "", 1, "killed"))
    recorder.close()
    agent.close()
    assert draw_run(tmp_path) is not None


def test_metrics_of_evaluations_have_a_panel_of_their_own(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, 0)
    recorder.emit(CPU)
    for number in range(1, 31):
        recorder.emit(step(number))
        if number % 10 == 0:
            metrics = {"accuracy": number / 100, "recall": math.nan if number == 20 else 0.5}
            recorder.emit(Evaluated(step=number, loss=1.0, metrics=metrics))
    recorder.close()
    history = load_history(tmp_path)
    panels = {axes.get_title(loc="left"): axes for axes in _figure(history, "demo").axes}
    lines = {line.get_label(): line for line in panels["evaluated"].get_lines()}
    assert list(lines["accuracy"].get_ydata()) == [0.1, 0.2, 0.3]
    assert list(lines["recall"].get_xdata()) == [10, 30], "what is not finite is left out"
    alone = replace(history, evals=tuple(replace(done, metrics={"accuracy": 0.25}) for done in history.evals))
    (panel,) = [axes for axes in _figure(alone, "demo").axes if axes.get_title(loc="left") == "evaluated accuracy"]
    assert panel.get_title(loc="right")
    bare = replace(history, evals=tuple(replace(done, metrics={}) for done in history.evals))
    assert "evaluated" not in {axes.get_title(loc="left") for axes in _figure(bare, "demo").axes}
