"""What W&B's own reader finds in the files of its offline mode."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys, dataclasses
from pathlib import Path
from closeranks.core.events import Evaluated, RunEnded
from closeranks.telemetry.config import TelemetryConfig
from closeranks.telemetry.sinks.config import WandbConfig
from closeranks.telemetry.sinks.sink import SinkContext
from closeranks.telemetry.sinks.wandb import WandbSink
from tests.telemetry.conftest import CPU, step

folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = TelemetryConfig(wandb=WandbConfig(project="tests", mode="offline", every=2))
sink = WandbSink(SinkContext(folder, config, job={"optim": {"lr": 0.1}}))
sink.open()
sink.handle([CPU, *(step(number, loss=float(number)) for number in range(first, last + 1))])
sink.handle([Evaluated(last, 0.5, 8.0, {"accuracy": 0.9}), RunEnded(last)])
sink.close()
"""


def record(folder: Path, first: int, last: int) -> None:
    """In a process of its own: W&B keeps a service process and threads until its process ends."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(first), str(last)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def rows(path: Path) -> list[dict[str, Any]]:
    """The history, by W&B's own messages: its package has the reader of these files in a program only."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in log_records(path.read_bytes()):
        one = wandb_internal_pb2.Record()
        one.ParseFromString(data)
        if one.WhichOneof("record_type") == "history":
            items = one.history.item
            found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log after W&B's seven bytes: blocks of 32 KiB, each fragment with checksum, length and
    type (1 whole, 2 first, 3 middle, 4 last)."""
    assert data[:4] == b":W&B"
    place, record = 7, b""
    while place + 7 <= len(data):
        if (1 << 15) - place % (1 << 15) < 7:
            place += (1 << 15) - place % (1 << 15)
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.world
def test_a_run_is_recorded_and_continued_under_one_id(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    record(folder, 1, 5)
    run_id = json.loads((folder / "sinks.json").read_text())["wandb"]
    (path,) = folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")
    found = rows(path)
    assert [(row["step"], row["train/loss"]) for row in found if "train/loss" in row] == [(2, 2.0), (4, 4.0)]
    assert [(row["step"], row["eval/accuracy"]) for row in found if "eval/accuracy" in row] == [(5, 0.9)]
    record(folder, 4, 8)
    assert json.loads((folder / "sinks.json").read_text())["wandb"] == run_id
    (other,) = set(folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb")) - {path}
    assert [row["step"] for row in rows(other) if "train/loss" in row] == [4, 6, 8]
