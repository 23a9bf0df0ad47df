import gzip
import json
from pathlib import Path

import pytest

from closeranks.telemetry.traces.trace_file import IS_CUT, write_trace
from tests.checkpoint.test_write_faults import tmpfs
from tests.telemetry.full import fill, needs_root


def written_by_torch(path: Path, num_events: int) -> Path:
    events = ",".join(f'\n  {{\n    "ph": "X",\n    "name": "op {number}"\n  }}' for number in range(num_events))
    path.write_text(f'{{\n    "schemaVersion": 1,\n    "traceEvents": [{events}\n  ],"traceName": "x.json" }}')
    return path


@pytest.mark.parametrize("most_bytes", [10**6, 3000])
def test_a_trace_that_is_too_large_ends_early_and_says_so(tmp_path: Path, most_bytes: int) -> None:
    raw, path = written_by_torch(tmp_path / "raw", 1000), tmp_path / "trace.json.gz"
    size = raw.stat().st_size
    write_trace(raw, path, most_bytes)
    with gzip.open(path) as file:
        content = file.read()
    found = json.loads(content)
    names = [event["name"] for event in found["traceEvents"]]
    assert names == [f"op {number}" for number in range(len(names))]
    is_cut = size > most_bytes
    assert found.get(IS_CUT, False) == is_cut
    assert (len(names) < 1000) == is_cut
    assert len(content) < most_bytes + 100
    assert len(names) > 50
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json.gz"]


def test_one_that_torch_could_not_finish_is_refused(tmp_path: Path) -> None:
    raw = written_by_torch(tmp_path / "raw", 10)
    raw.write_bytes(raw.read_bytes()[:-30])
    with pytest.raises(OSError, match="No space left"):
        write_trace(raw, tmp_path / "trace.json.gz")
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    raw = written_by_torch(tmp_path / "raw", 1000)
    with tmpfs(tmp_path / "disk", "64k") as place:
        filler = fill(place)
        with pytest.raises(OSError, match="No space left"):
            write_trace(raw, place / "trace.json.gz")
        assert list(place.iterdir()) == [filler]
