from pathlib import Path

import pytest

from closeranks.core.errors import UserError
from closeranks.telemetry.traces.trace_mailbox import (
    TraceAnswer,
    TraceMailbox,
    TraceRequest,
    decode_request,
    encode_request,
    new_request,
)


def test_a_request_is_taken_once_and_answered(tmp_path: Path) -> None:
    asking, run = TraceMailbox(tmp_path), TraceMailbox(tmp_path)
    assert run.take() is None
    request = new_request(3, [1])
    with asking.claim():
        asking.post(request)
        assert asking.is_waiting
        assert run.take() == request
        assert run.take() is None
        assert not asking.is_waiting
        assert asking.answer_to(request) is None
        answer = TraceAnswer(request.id, "", 5, 7, 1, [1])
        run.answer(answer)
        assert asking.answer_to(request) == answer
        assert asking.answer_to(new_request(3, [1])) is None, "an answer to another request is none"
        asking.withdraw()


def test_one_asks_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match="another `closeranks profile`")
    with TraceMailbox(tmp_path).claim(), refused, TraceMailbox(tmp_path).claim():
        pass
    with TraceMailbox(tmp_path).claim():
        pass


@pytest.mark.parametrize("content", ["", "[]", "{", '{"num_steps": "three"}', '{"ranks": [1.5]}', "[" * 100_000])
def test_what_is_no_request_is_taken_away_and_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "request.json").write_text(content)
    mailbox = TraceMailbox(tmp_path)
    with pytest.raises((ValueError, TypeError)):
        mailbox.take()
    assert mailbox.take() is None


def test_requests_that_cannot_be_granted_say_why() -> None:
    assert TraceRequest("a", 3, [0, 1]).problem(2) == ""
    assert "not 0" in TraceRequest("a", 0).problem(2)
    assert "not 101" in TraceRequest("a", 101).problem(2)
    assert TraceRequest("a", 1, [2]).problem(2) == "there is no rank 2: the run has ranks 0 to 1"
    assert TraceRequest("a", 1).traces(7)
    assert not TraceRequest("a", 1, [2]).traces(7)


def test_a_request_survives_the_way_to_other_ranks() -> None:
    request = new_request(3, [0, 5])
    assert decode_request(encode_request(request)) == request
