"""Buckets whose size was measured keep it, whatever becomes of the workers: gradients are added up in its order."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.core.events import RunStarted
from closeranks.telemetry.run_log.recorder import read_events
from tests.faults.harness import Ran, assert_clean, assert_struck, go

pytestmark = [pytest.mark.world, pytest.mark.timeout(300)]


def starts(ran: Ran) -> list[RunStarted]:
    lines = read_events(ran.run / "metrics" / "rank-00000.jsonl")
    return [event for _, event in lines if isinstance(event, RunStarted)]


def test_a_recovered_generation_keeps_what_the_first_one_measured(tmp_path: Path) -> None:
    ran = go(
        tmp_path, "ddp", "sync.bucket_mib=auto", "train.steps=6", faults="kill(rank=1, step=2), kill(rank=0, step=4)"
    )
    assert ran.code == 0, ran.said
    assert_clean(ran)
    assert_struck(ran, "killed", "killed")
    first, *later = starts(ran)
    assert [one.generation for one in (first, *later)] == [0, 1, 2]
    assert first.bucket_mib > 0
    assert first.link_bytes_per_s
    assert [(one.bucket_mib, one.link_bytes_per_s) for one in later] == [(first.bucket_mib, None)] * 2
    assert ran.out.count("between ranks") + ran.err.count("between ranks") == 1
