"""What a worker tells of an exception."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path

import pytest

from closeranks.agent.detection.failure import (
    FailureReport,
    failure_report,
    is_consequence,
    plain_message,
    user_location,
)
from closeranks.core.errors import CheckpointError, CloseranksError, decode


def caught(raising: str) -> BaseException:
    try:
        exec(raising)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "message",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711",
        "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        "Application timeout caused pair closure",
        "Connection reset by peer",
        "NCCL communicator was aborted on rank 0.",
        "NCCL error: remote process exited or there was a network error",
        "Gloo connectFullMesh failed with Connection refused",
        "wait timeout after 300000ms, keys: /0",
        "Broken pipe",
    ],
)
def test_what_a_lost_peer_sounds_like(message: str) -> None:
    assert is_consequence(RuntimeError(message))


@pytest.mark.parametrize(
    "message", ["CUDA out of memory", "shape mismatch", "division by zero", "the peer group is odd"]
)
def test_what_it_does_not_sound_like(message: str) -> None:
    assert not is_consequence(RuntimeError(message))


def test_the_chain_is_looked_at_but_not_below_a_users_mistake() -> None:
    lost = ConnectionResetError("gone")
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = lost
    assert is_consequence(wrapped)
    mistake = CheckpointError("the file is damaged")
    mistake.__cause__ = lost
    assert not is_consequence(mistake)
    assert is_consequence(CloseranksError("rank 0 has not opened its store within 60 s"))


def test_a_report_survives_the_wire() -> None:
    before = time.monotonic()
    report = failure_report(caught("raise ValueError('odd')"), step=4)
    assert FailureReport(**json.loads(json.dumps(report.fields()))) == report
    assert (report.kind, report.message, report.step, report.is_consequence, report.error) == (
        "ValueError",
        "odd",
        4,
        False,
        None,
    )
    assert before <= report.at <= time.monotonic()
    assert report.traceback.endswith("ValueError: odd\n")


def test_an_error_of_ours_comes_out_as_it_went_in() -> None:
    report = failure_report(CheckpointError("damaged", "Take another."), step=None)
    assert report.error is not None
    assert str(decode(report.error)) == "damaged. Take another."


def test_the_c_plus_plus_frames_are_cut() -> None:
    text = "shape mismatch\nException raised from check at tensor.cpp:7 (most recent call first):\nframe #0"
    assert plain_message(RuntimeError(text)) == "shape mismatch"


def test_the_place_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's frame is named though the standard library raised, deeper down."""
    (tmp_path / "their_model.py").write_text("import json\n\ndef load():\n    json.loads('{')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("their_model")
    with pytest.raises(json.JSONDecodeError) as info:
        module.load()
    assert user_location(info.value) == "their_model.py:4 in load"


def test_the_place_of_a_syntax_error_is_in_the_file_itself(tmp_path: Path) -> None:
    error = SyntaxError("invalid syntax", (str(tmp_path / "broken.py"), 3, 1, "x ="))
    assert user_location(error) == f"{tmp_path / 'broken.py'}:3"
    assert plain_message(error) == "invalid syntax"


def test_an_exception_that_was_never_raised_has_no_place() -> None:
    assert user_location(ValueError("made")) == ""
