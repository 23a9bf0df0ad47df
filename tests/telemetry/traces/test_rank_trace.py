import gzip
from pathlib import Path
from typing import Any

import pytest

from closeranks.telemetry.traces.rank_trace import TraceDamaged, read_header, read_rank_trace
from tests.telemetry.traces.rank_files import BASE_NS, event, header, write


def test_times_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    trace = read_rank_trace(write(tmp_path / "t.gz", [event("op", 4_176_916_395_051.135, 0.121)]))
    (found,) = trace.events
    assert found.begin_ns == BASE_NS + 4_176_916_395_051_135
    assert found.duration_ns == 121
    assert trace.header == read_header(tmp_path / "t.gz")
    assert trace.header.title == "rank 0 (host here, data 0)"


def test_the_phases_add_up_to_each_step(tmp_path: Path) -> None:
    own = header()
    own["phases"] = [[BASE_NS, "data"], [BASE_NS + 300, "forward"], [BASE_NS + 1_200_000, "vote"]]
    spans = list(read_header(write(tmp_path / "t.gz", [], own)).phase_spans())
    assert [(one.step, one.name, one.end_ns - one.begin_ns) for one in spans] == [
        (5, "data", 300),
        (5, "forward", 999_700),
        (6, "forward", 200_000),
        (6, "vote", 800_000),
    ]


ODD: list[dict[str, Any]] = [
    {},
    {"ph": "X", "name": "no time"},
    {"ph": "X", "name": "text", "ts": "5"},
    {"ph": "X", "name": 5, "ts": 5},
    {"ph": "X", "name": "far", "ts": 1e300},
    {"ph": "X", "name": "not a number", "ts": float("nan")},
    {"ph": "X", "name": "endless", "ts": 1.0, "dur": float("inf")},
    {"ph": "M", "name": "thread_name", "args": {}},
    {"ph": "M", "name": "thread_name"},
    {"ph": "X", "name": "PyTorch Profiler (0)", "cat": "Trace", "ts": 1.0, "dur": 1.0},
]


def test_what_is_no_event_is_left_out(tmp_path: Path) -> None:
    trace = read_rank_trace(write(tmp_path / "t.gz", [*ODD, event("op", 1, 1)]))
    assert [one.name for one in trace.events] == ["op"]


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"steps": []}, "no steps"),
        ({"steps": [[1, 2]]}, "header is damaged"),
        ({"steps": [[1, 2, "3"]]}, "whole number"),
        ({"phases": [[1]]}, "header is damaged"),
        ({"rank": "first"}, "rank"),
        ({"instants": None}, "header is damaged"),
    ],
)
def test_a_header_that_no_rank_wrote_is_refused(tmp_path: Path, own: dict[str, Any], why: str) -> None:
    path = write(tmp_path / "t.gz", [], {**header(), **own})
    for read in (read_header, read_rank_trace):
        with pytest.raises(TraceDamaged, match=why):
            read(path)


def test_a_file_that_is_cut_off_or_is_no_trace_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "t.gz", [event(f"op {number}", number, 1) for number in range(5000)]).read_bytes()
    path = tmp_path / "bad.gz"
    for content in (b"", whole[:40], whole[:-9], b"no gzip at all", gzip.compress(b"[]"), gzip.compress(b"[" * 10**6)):
        path.write_bytes(content)
        with pytest.raises(TraceDamaged):
            read_rank_trace(path)
