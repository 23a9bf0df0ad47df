"""The report of a long run is drawn from the index: no spike is lost, and time and memory do not grow with the run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from closeranks.run.diagnosis import findings_section
from closeranks.telemetry.reports.pages import write_pages
from closeranks.telemetry.reports.run_plot import _figure
from closeranks.telemetry.run_log.recorder import EventRecorder
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.run_log.run_history import load_history
from tests.telemetry.conftest import CPU, step
from tests.telemetry.run_log.long_run import record_session, small_blocks, write_rank

DRAW = """
import json, resource, sys
from pathlib import Path
from closeranks.run.diagnosis import findings_section
from closeranks.telemetry.reports.pages import write_pages

def num_read():
    return int(Path("/proc/self/io").read_text().split()[1])

before = num_read()
write_pages(Path(sys.argv[1]), lambda text: None, findings=findings_section)
usage = resource.getrusage(resource.RUSAGE_SELF)
cpu_s = usage.ru_utime + usage.ru_stime
# Not ru_maxrss, which a process inherits from the one that started it.
kib = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"read": num_read() - before, "kib": kib, "cpu_s": cpu_s}))
"""


def drawn(folder: Path) -> dict[str, float]:
    """All pages and pictures of a run, in a process of its own: what that read, its memory and processor time."""
    done = subprocess.run([sys.executable, "-c", DRAW, str(folder)], check=True, capture_output=True, text=True)
    run = RunFolder(folder)
    assert all(path.exists() for path in (run.report, run.html, run.plot, run.phase_plot))
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{folder.name}: {found}")
    return found


def test_a_spike_of_one_step_is_drawn_from_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    recorder = EventRecorder(tmp_path, 0)
    recorder.emit(CPU)
    for number in range(1, 2001):
        recorder.emit(step(number, loss=50.0 if number == 1234 else 2.0, grad_norm=9.0 if number == 700 else 1.0))
    recorder.close()
    history = load_history(tmp_path)
    assert not {700, 1234} & {one.step for one in history.steps}, "or it would prove nothing"
    panels = {axes.get_title(loc="left"): axes for axes in _figure(history, "demo").axes}
    loss, smooth = panels["loss"].get_lines()[:2]
    (place,) = (place for place, value in enumerate(loss.get_ydata()) if value == 50.0)
    assert abs(loss.get_xdata()[place] - 1234) <= 16
    assert max(smooth.get_ydata()) < 10
    assert 9.0 in panels["gradient norm"].get_lines()[0].get_ydata()
    assert panels["throughput"].get_lines()[1].get_ydata()[5:] == pytest.approx(10_000)


def pages_of(folder: Path) -> str:
    write_pages(folder, lambda text: None, findings=findings_section)
    return RunFolder(folder).report.read_text()


def test_the_report_counts_all_steps_and_says_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    record_session(tmp_path, 1, 900, is_killed=True)
    record_session(tmp_path, 880, 2000, 1)
    text = pages_of(tmp_path)
    assert "Trained 2000 steps" in text
    assert "2.00M tokens, 54 skipped" in text
    assert "2000 skipped and excluded" in text
    assert "Note: of 2,000 steps, " in text
    assert text.count("phases.png") == 1
    assert "| forward | 40.0% | 40 ms | 40 ms |" in text


@pytest.mark.parametrize("seed", range(3))
def test_damaged_metrics_and_indexes_cost_what_they_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    small_blocks(monkeypatch)
    record_session(tmp_path, 1, 600)
    rng = random.Random(seed)
    for path in (tmp_path / "metrics").iterdir():
        content = bytearray(path.read_bytes()[: rng.randrange(5000, path.stat().st_size)])
        for _ in range(20):
            content[rng.randrange(1000, len(content))] = rng.randrange(256)
        path.write_bytes(content)
    assert "damaged or of other metrics" in pages_of(tmp_path)


def test_a_million_steps_are_drawn_from_the_index(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, 1_000_000)
    size = RunFolder(tmp_path).metrics(0).stat().st_size
    found = drawn(tmp_path)
    assert found["read"] < size / 2
    assert found["kib"] < 400 << 10
    assert "Trained 1000000 steps" in RunFolder(tmp_path).report.read_text()


def test_a_thousand_ranks_are_drawn(tmp_path: Path) -> None:
    for rank in range(1000):
        write_rank(tmp_path, rank, 2000, 1000)
    size = sum(path.stat().st_size for path in tmp_path.glob("metrics/*"))
    found = drawn(tmp_path)
    assert found["read"] < size
    assert found["kib"] < 500 << 10
