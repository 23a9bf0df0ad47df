import time
from dataclasses import replace
from pathlib import Path

from closeranks.core.events import RunEnded, RunStarted, StepDone
from closeranks.telemetry.live.status import RunStatus, StatusFreshness, StatusWriter, this_process
from closeranks.telemetry.run_log.recorder import EventRecorder
from closeranks.telemetry.traces.run_watch import LastEvents, RunWatch, ending, last_events

NOW = StatusFreshness.NOW


def test_a_run_with_an_agent_is_known_by_its_status() -> None:
    status = RunStatus(state="finished", at=1000.0)
    assert ending(status, StatusFreshness.ENDED, LastEvents("finished", 999.0)) == "has ended (finished)"
    assert "agent is gone" in ending(replace(status, state="running"), StatusFreshness.GONE, LastEvents("", 1001.0))
    assert ending(replace(status, state="running"), NOW, LastEvents("failed", 999.0)) == ""


def test_one_without_an_agent_by_its_events(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, 0)
    recorder.emit(RunStarted())
    recorder.emit(StepDone(step=1))
    watch = RunWatch(tmp_path)
    assert watch.ending() == ""
    recorder.emit(RunEnded(1, "drained"))
    assert watch.ending() == "has ended (drained)"
    recorder.emit(RunStarted())
    assert watch.ending() == "", "it was resumed"
    recorder.close()
    assert last_events(tmp_path / "metrics" / "rank-00000.jsonl").at <= time.time()


def test_the_later_record_counts(tmp_path: Path) -> None:
    """A run of an agent that was continued by torchrun."""
    StatusWriter(tmp_path).write(RunStatus(state="finished", at=time.time() - 60, writer=this_process()))
    assert RunWatch(tmp_path).ending() == "has ended (finished)"
    recorder = EventRecorder(tmp_path, 0)
    recorder.emit(RunStarted())
    recorder.close()
    assert RunWatch(tmp_path).ending() == ""
