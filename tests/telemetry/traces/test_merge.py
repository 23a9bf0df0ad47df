from pathlib import Path
from typing import Any

import pytest

from closeranks.telemetry.traces.merge import merge_traces
from closeranks.telemetry.traces.rank_trace import TraceDamaged
from tests.telemetry.traces.rank_files import BASE_NS, PID, event, header, kernel, merged, write

SKEW_NS = 3_600_000_000_000


def rank_file(folder: Path, rank: int, skew_ns: int = 0, **own: Any) -> Path:
    """An all-reduce from 400 to 500 us, by a clock that is ahead."""
    found = header(rank, **own)
    found["steps"] = [[step, begin + skew_ns, end + skew_ns] for step, begin, end in found["steps"]]
    found["phases"] = [[at + skew_ns, name] for at, name in found["phases"]]
    events = [event("all_reduce", 400, 100), kernel("matmul", 410, 20)]
    arrows = [{"ph": kind, "id": 9, "cat": "ac2g", "name": "ac2g", "pid": PID, "tid": PID, "ts": 401} for kind in "sf"]
    names = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7 "}}]
    path = folder / f"rank-{rank:05d}.json.gz"
    return write(path, [*events, *arrows, *names], found, baseTimeNanoseconds=BASE_NS + skew_ns)


def test_every_rank_is_a_process_with_its_phases_on_top(tmp_path: Path) -> None:
    paths = {rank: rank_file(tmp_path, rank) for rank in (0, 3)}
    summary = merge_traces(paths, tmp_path / "all.json.gz")
    events = merged(tmp_path / "all.json.gz")
    titles = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert titles == {0: "rank 0 (host here, data 0)", 3: "rank 3 (host here, data 3)"}
    for rank in paths:
        own = [one for one in events if one["pid"] == rank]
        tracks = {one["tid"]: one["args"]["name"] for one in own if one["name"] == "thread_name"}
        assert [tracks[track] for track in sorted(tracks)] == ["phases", f"thread {PID}", "device 0 stream 7"]
        (phases, *_) = sorted(tracks)
        assert [
            (one["name"], one["ts"], one["dur"]) for one in own if one.get("tid") == phases and one["ph"] == "X"
        ] == [
            *(("step 5", 0, 1000), ("step 6", 1000, 1000)),
            *(("forward", 0, 500), ("vote", 500, 500), ("forward", 1000, 500), ("vote", 1500, 500)),
        ]
    assert [rank.rank for rank in summary.ranks] == [0, 3]
    assert (summary.first_step, summary.last_step) == (5, 6)
    assert summary.clock_error_s == pytest.approx(5e-5)


def test_numbers_of_threads_and_arrows_are_unique_in_the_whole_file(tmp_path: Path) -> None:
    merge_traces({rank: rank_file(tmp_path, rank) for rank in (0, 3)}, tmp_path / "all.json.gz")
    events = [one for one in merged(tmp_path / "all.json.gz") if one["ph"] != "M"]
    assert {one["pid"] for one in events} == {0, 3}
    owners = {(one["tid"], one["pid"]) for one in events}
    assert len({track for track, _ in owners}) == len(owners)
    arrows = {(one["id"], one["pid"]) for one in events if one["ph"] in "sf"}
    assert len({number for number, _ in arrows}) == len(arrows) == 2


@pytest.mark.parametrize("clock", ["another", "one"])
def test_the_clock_of_another_host_is_corrected(tmp_path: Path, clock: str) -> None:
    instants = [(BASE_NS - 10**7 + at, BASE_NS - 10**7 + at + 150_000) for at in range(0, 8 * 10**6, 10**6)]
    later = [(enter + SKEW_NS, leave + SKEW_NS) for enter, leave in instants]
    paths = {
        0: rank_file(tmp_path, 0, instants=instants),
        1: rank_file(tmp_path, 1, SKEW_NS, instants=later, clock=clock),
    }
    summary = merge_traces(paths, tmp_path / "all.json.gz")
    assert summary.clock_error_s is not None
    starts = [one["ts"] for one in merged(tmp_path / "all.json.gz") if one["name"] == "all_reduce"]
    is_aligned = abs(starts[0] - starts[1]) <= summary.clock_error_s * 1e6
    assert is_aligned == (clock == "another"), "ranks that claim one clock are not corrected"
    if clock == "another":
        assert summary.clock_error_s == pytest.approx(200e-6)


def test_a_damaged_trace_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    paths = {rank: rank_file(tmp_path, rank) for rank in (0, 1)}
    paths[1].write_bytes(paths[1].read_bytes()[:-20])
    with pytest.raises(TraceDamaged, match="the trace of rank 1"):
        merge_traces(paths, tmp_path / "all.json.gz")
    assert sorted(tmp_path.iterdir()) == sorted(paths.values())
