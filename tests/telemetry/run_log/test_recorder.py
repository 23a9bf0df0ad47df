import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import SetupError
from closeranks.core.events import Evaluated, Event, RankLost, RanksClosed, RunStarted, StepDone, Warned, encode
from closeranks.telemetry.run_log.recorder import AGENT, EventRecorder, parse_line, read_events, to_line
from tests.cost import python_calls


def path_of(folder: Path, rank: int = 0) -> Path:
    return folder / "metrics" / f"rank-{rank:05d}.jsonl"


def test_a_line_is_the_event_with_its_time_and_rank(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, 3)
    event = StepDone(step=7, loss=2.5, metrics={"accuracy": 0.5})
    before = time.time()
    recorder.emit(event)
    recorder.close()
    fields = json.loads(path_of(tmp_path, 3).read_text())
    assert list(fields)[:3] == ["event", "at", "rank"]
    assert before <= fields.pop("at") <= time.time()
    assert fields == {**encode(event), "rank": 3}


def test_events_come_back_as_they_were(tmp_path: Path) -> None:
    events: list[Event] = [RunStarted(rank=0, versions={"torch": "2"}), StepDone(step=1), Warned("NaN", step=1)]
    recorder = EventRecorder(tmp_path, 0)
    for event in events:
        recorder.emit(event)
    recorder.close()
    assert [event for _, event in read_events(path_of(tmp_path))] == events


@given(st.recursive(st.floats(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner), max_leaves=5))
def test_every_float_survives_strict_json(value: object) -> None:
    line = to_line({"value": value})

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    json.loads(line, parse_constant=refuse)
    back = parse_line(line)
    assert back is not None
    assert repr(back["value"]) == repr(value)


def test_a_torn_line_is_passed_over_and_spoils_no_later_one(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, 0)
    recorder.emit(StepDone(step=1))
    recorder.close()
    with path_of(tmp_path).open("a") as file:
        file.write('{"event": "step", "st')
    assert [event for _, event in read_events(path_of(tmp_path))] == [StepDone(step=1)]
    recorder = EventRecorder(tmp_path, 0)
    recorder.emit(StepDone(step=2))
    recorder.close()
    assert [event for _, event in read_events(path_of(tmp_path))] == [StepDone(step=1), StepDone(step=2)]


def test_an_event_of_a_newer_version_is_kept_as_fields(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"event": "closed_ranks", "rank": 7}\n[]\n')
    assert list(read_events(path)) == [({"event": "closed_ranks", "rank": 7}, None)]


def test_what_was_emitted_survives_sigkill(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from closeranks.core.events import StepDone\n"
        "from closeranks.telemetry.run_log.recorder import EventRecorder\n"
        "recorder = EventRecorder(Path(sys.argv[1]), 0)\n"
        "for step in range(100): recorder.emit(StepDone(step=step))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [fields["step"] for fields, _ in read_events(path_of(tmp_path))] == list(range(100))


def test_sinks_hear_in_order_and_one_that_raises_is_removed_with_a_warning(tmp_path: Path) -> None:
    heard: list[tuple[str, Event]] = []

    def broken(event: Event) -> None:
        raise ValueError("no pen")

    recorder = EventRecorder(tmp_path, 0)
    recorder.add_sink(lambda event: heard.append(("first", event)))
    recorder.add_sink(broken)
    recorder.add_sink(lambda event: heard.append(("last", event)))
    recorder.emit(StepDone(step=1))
    recorder.emit(StepDone(step=2))
    recorder.close()
    warnings = [event for _, event in read_events(path_of(tmp_path)) if isinstance(event, Warned)]
    assert len(warnings) == 1
    assert "broken receives no more events: it raised ValueError: no pen" in warnings[0].what
    assert [who for who, event in heard if isinstance(event, StepDone)] == ["first", "last", "first", "last"]
    assert [who for who, event in heard if isinstance(event, Warned)] == ["first", "last"]


def test_sinks_that_all_raise_end_in_silence_not_in_a_loop(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, 0)
    for _ in range(3):
        recorder.add_sink(lambda event: 1 / 0)
    recorder.emit(StepDone(step=1))
    recorder.close()
    assert sum(isinstance(event, Warned) for _, event in read_events(path_of(tmp_path))) == 3


def test_a_full_disk_is_a_warning_to_the_sinks_and_no_error(tmp_path: Path) -> None:
    heard: list[Event] = []
    path_of(tmp_path).parent.mkdir()
    path_of(tmp_path).symlink_to("/dev/full")
    recorder = EventRecorder(tmp_path, 0)
    recorder.add_sink(heard.append)
    recorder.emit(StepDone(step=1))
    recorder.emit(StepDone(step=2))
    words = "the metrics of rank 0 cannot be written (No space left on device): training continues; they are written"
    assert heard == [Warned(f"{words} once they can be"), StepDone(step=1), StepDone(step=2)]
    path_of(tmp_path).unlink()
    recorder.close()
    assert [event for _, event in read_events(path_of(tmp_path))] == [StepDone(step=1), heard[0], StepDone(step=2)]
    assert heard[3:] == []


def test_after_a_run_has_begun_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    """Workers that go on with a run, with a file in the way of their metrics."""
    heard: list[Event] = []
    (tmp_path / "metrics").write_text("")
    recorder = EventRecorder(tmp_path, 0, must_open=False)
    recorder.add_sink(heard.append)
    recorder.emit(StepDone(step=1))
    (warned,) = (event for event in heard if isinstance(event, Warned))
    assert "the metrics of rank 0 cannot be written (File exists)" in warned.what
    (tmp_path / "metrics").unlink()
    recorder.close()
    assert StepDone(step=1) in [event for _, event in read_events(path_of(tmp_path))]


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("a file in the way")
    with pytest.raises(SetupError, match=r"run\.folder"):
        EventRecorder(tmp_path, 0)


def test_emitting_is_cheap(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, 0)
    event = StepDone(step=7, loss=2.5, metrics={"accuracy": 0.5})
    assert python_calls(lambda: recorder.emit(event)) < 1500, "some 300; an fsync takes a hundred times as long"
    recorder.close()


def test_a_value_that_is_not_finite_is_read_back_as_one(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, 0)
    recorder.emit(Evaluated(step=1, loss=math.nan, metrics={"accuracy": -math.inf}))
    recorder.close()
    (_, event) = next(read_events(path_of(tmp_path)))
    assert isinstance(event, Evaluated)
    assert math.isnan(event.loss)
    assert event.metrics == {"accuracy": -math.inf}


def test_the_agent_has_a_file_of_its_own(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, AGENT)
    events = [RankLost(0, 3, "b", 40, "killed", "killed by SIGKILL"), RanksClosed(1, 40, 0.9, parts={"fork": 0.1})]
    for event in events:
        recorder.emit(event)
    recorder.close()
    lines = list(read_events(tmp_path / "metrics" / "agent.jsonl"))
    assert [event for _, event in lines] == events
    assert lines[0][0]["rank"] == 3, "whom it is about"
    assert lines[1][0]["rank"] == AGENT
    assert not path_of(tmp_path).exists()
