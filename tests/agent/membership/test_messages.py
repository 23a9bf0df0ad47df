from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.detection.progress import WorkerPhase
from closeranks.agent.membership import messages as m
from closeranks.agent.membership.field_codecs import MOST, ProtocolError
from closeranks.core.requests import DRAIN, REGROUP, SAVE

whole = st.integers(0, MOST)
short = st.integers(0, 4096)
or_none = st.integers(-1, MOST)
seconds = st.floats(0, 1e6)
pause = st.floats(0.001, 3600)
tables = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)
names = st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True)
phases = st.integers(0, len(WorkerPhase) - 1)
rows = st.builds(m.RankProgress, whole, or_none, phases, seconds, whole, or_none, seconds, whole, whole)
per_host = st.lists(st.integers(1, 16), min_size=1, max_size=20).map(tuple)
BODIES: list[st.SearchStrategy[m.MessageBody]] = [
    st.builds(m.Join, st.integers(1, 4096), or_none, tables),
    st.builds(m.Heartbeat, whole, or_none, st.booleans(), whole, st.lists(rows, max_size=3).map(tuple)),
    *(st.builds(kind, whole, tables) for kind in (m.WorkerFailed, m.Fenced, m.WorkersDone)),
    st.builds(m.Leaving, st.text(max_size=20)),
    st.builds(m.WorkerEvent, whole, or_none, tables),
    st.builds(m.WorkerOutput, whole, or_none, st.text(max_size=20)),
    st.builds(m.HostNote, st.text(max_size=20)),
    st.builds(m.StoreAddress, whole, names),
    st.builds(m.Welcome, pause, pause, tables),
    st.builds(m.HeartbeatAck, whole, pause, pause),
    per_host.flatmap(
        lambda counts: st.builds(m.BeginGeneration, whole, st.integers(0, len(counts) - 1), st.just(counts), tables)
    ),
    st.builds(m.WorkerRequest, whole, st.integers(1, MOST), st.sampled_from([DRAIN, SAVE, REGROUP])),
    st.builds(m.Fence, whole),
    st.builds(m.Dismiss, st.text(max_size=20)),
]
envelopes = st.builds(m.Envelope, whole, names, whole, whole, st.one_of(BODIES))


def test_every_kind_is_tried() -> None:
    kinds = {kind.kind for kind in vars(m).values() if isinstance(kind, type) and issubclass(kind, m.MessageBody)}
    assert len(BODIES) == len(kinds - {""})


@given(envelopes)
def test_what_is_sent_arrives(envelope: m.Envelope) -> None:
    assert m.Envelope.from_fields(json.loads(json.dumps(envelope.to_fields()))) == envelope


foreign = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.just([[[]]]),
    tables,
)


@given(envelopes, st.data())
def test_a_changed_message_is_refused_or_still_a_message(envelope: m.Envelope, data: st.DataObject) -> None:
    """Whatever is decoded encodes to the same fields again: nothing slipped through that was not looked at."""
    told = envelope.to_fields()
    key = data.draw(st.sampled_from(sorted(told)))
    told[key] = data.draw(foreign)
    try:
        taken = m.Envelope.from_fields(told)
    except ProtocolError:
        return
    assert taken.to_fields() == told


@given(st.recursive(foreign, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))
def test_foreign_values_are_refused(value: Any) -> None:
    with pytest.raises(ProtocolError):
        m.Envelope.from_fields(value)


def fields(body: m.MessageBody, **changes: Any) -> dict[str, Any]:
    return {**m.Envelope(1, "a", 2, 3, body).to_fields(), **changes}


def _before_requests_were_one_value() -> dict[str, Any]:
    """As version 1 of the control channel said it."""
    told = fields(m.WorkerRequest(1, 1, DRAIN), drain=True, save=True, regroup=False)
    del told["request"]
    return told


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (fields(m.Fence(1), kind="exec"), "no message of the kind 'exec'"),
        (fields(m.Fence(1), kind=["fence"]), "no message of the kind"),
        (fields(m.Fence(1), more=1), "should not have"),
        ({k: v for k, v in fields(m.Fence(1)).items() if k != "generation"}, "fence lacks generation"),
        (fields(m.Fence(1), generation=True), "fence.generation must be a whole number"),
        (fields(m.Fence(1), generation=1.0), "fence.generation must be a whole number"),
        (fields(m.Fence(1), generation=-1), "fence.generation must be a whole number"),
        (fields(m.Fence(1), generation=1 << 200), "not a number of many digits"),
        (fields(m.Fence(1), host=""), "fence.host must be a name"),
        (fields(m.Fence(1), host="a\nb"), "fence.host must be a name"),
        (fields(m.Fence(1), host="a" * 300), "at most 255 characters"),
        (fields(m.Welcome(1, 1), beat_s=0.0), "welcome.beat_s must be a number from 0.001"),
        (fields(m.Welcome(1, 1), beat_s=math.nan), "welcome.beat_s must be a number"),
        (fields(m.Welcome(1, 1), plan={"a": math.inf}), "not finite"),
        (fields(m.Welcome(1, 1), plan={1: 2}), "a key that is not text"),
        (fields(m.Welcome(1, 1), plan={"a": b"x"}), "not a JSON value"),
        (fields(m.BeginGeneration(1, 0, (1,)), number=1), "begin.number is 1 among 1 hosts"),
        (fields(m.BeginGeneration(1, 0, (1,)), per_host=[[1 << 20, 2]]), "more than 1048576 workers"),
        (fields(m.BeginGeneration(1, 0, (1,)), per_host=[]), "must be runs"),
        (fields(m.Join(1), num_workers=0), "join.num_workers must be a whole number from 1"),
        (
            fields(m.WorkerRequest(1, 1, DRAIN), request="dance"),
            "ask.request must be one of drain, save, .*, not 'dance'",
        ),
        (fields(m.WorkerRequest(1, 1, DRAIN), request=["drain"]), "ask.request must be one of"),
        (_before_requests_were_one_value(), "ask lacks request"),
        (fields(m.Heartbeat(1), progress=[[1, 2]]), "rows of 9 values"),
        (
            fields(m.Heartbeat(1), progress=[[0, 0, len(WorkerPhase), 0.0, 0, 0, 0.0, 0, 0]]),
            "phase must be a whole number from 0",
        ),
        ([], "must be a table"),
    ],
)
def test_refusals(told: Any, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        m.Envelope.from_fields(told)


def test_depth_is_bounded_by_us_and_not_by_the_interpreter() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ProtocolError, match="nested deeper"):
        m.Envelope.from_fields(fields(m.Welcome(1, 1), plan={"a": deep}))


@given(per_host, st.data())
def test_ranks_follow_from_the_numbers_of_workers(counts: tuple[int, ...], data: st.DataObject) -> None:
    begins = [m.BeginGeneration(0, number, counts) for number in range(len(counts))]
    assert [rank for begin in begins for rank in begin.ranks] == list(range(begins[0].world_size))
    begin = data.draw(st.sampled_from(begins))
    assert [rank for rank, host in enumerate(begin.hosts) if host == begin.number] == list(begin.ranks)


def test_ten_thousand_hosts_fit_in_a_line() -> None:
    begin = m.BeginGeneration(0, 9_999, (8,) * 10_000)
    assert len(json.dumps(m.Envelope(1, "a", 1, 1, begin).to_fields())) < 200
