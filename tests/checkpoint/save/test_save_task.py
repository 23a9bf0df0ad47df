"""Orders, settings and reports survive the trip to another process."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from closeranks.checkpoint.config import CheckpointConfig
from closeranks.checkpoint.format.manifest import Chunk
from closeranks.checkpoint.save.save_task import (
    SaveReport,
    SaveSettings,
    SaveTask,
    decode_report,
    decode_save_task,
    decode_settings,
    encode_report,
    encode_save_task,
    encode_settings,
)
from closeranks.core.pieces import Piece
from tests.checkpoint import saving

WHOLE = Piece.whole("w", (4, 6))
CHUNKS = st.builds(
    Chunk,
    st.sampled_from(["model", "optimizer"]),
    st.just("w"),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([WHOLE, WHOLE.shard(0, 1, 2), WHOLE.flattened(3, 9), Piece.whole("w", ())]),
    st.integers(0, 2**40),
    st.integers(0, 2**32 - 1),
)
ORDERS = st.builds(
    SaveTask,
    save=st.text(),
    folder=st.text(),
    step=st.integers(0, 2**60),
    rank=st.integers(0, 10**5),
    num_ranks=st.integers(1, 10**5),
    layout=st.text(),
    chunks=st.lists(CHUNKS, max_size=5).map(tuple),
    is_full=st.booleans(),
    to_remote=st.booleans(),
    tree=st.none() | st.dictionaries(st.text(), st.integers() | st.floats(allow_nan=False) | st.lists(st.text())),
    metric=st.none() | st.floats(allow_nan=False),
)


@given(ORDERS)
def test_an_order_comes_out_as_it_went_in(order: SaveTask) -> None:
    assert decode_save_task(json.loads(json.dumps(encode_save_task(order)))) == order


@given(ORDERS)
def test_chunks_lie_back_to_back(order: SaveTask) -> None:
    ends = [begin + chunk.num_bytes for begin, chunk in zip(order.offsets, order.chunks, strict=True)]
    assert [0, *ends][:-1] == list(order.offsets) if order.chunks else order.offsets == ()
    assert order.num_bytes == ([0, *ends])[-1]


def test_settings_and_reports_come_out_as_they_went_in(tmp_path: Path) -> None:
    made = saving.settings(tmp_path, remote="s3://bucket/run", timeout_s=0.1)
    assert decode_settings(json.loads(json.dumps(encode_settings(made)))) == made
    report = SaveReport("collected", "t-1", 4, "remote", "why", "path", 7, 0.1, ("step-00000001", "step-00000002"))
    assert decode_report(json.loads(json.dumps(encode_report(report)))) == report


def test_settings_follow_the_config() -> None:
    config = CheckpointConfig(
        keep_last=7, keep_every=100, keep_best=2, read_back=False, timeout_s=5.0, nice=3, remote="r"
    )
    made = SaveSettings.from_config(config, "runs/x/checkpoints")
    assert made == SaveSettings("runs/x/checkpoints", "r", 7, 100, 2, False, 5.0, 3)
    assert SaveSettings.from_config(CheckpointConfig(folder="/elsewhere"), "here").place == "/elsewhere"
