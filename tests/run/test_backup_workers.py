"""Runs with backup workers: every sample is taken once, through late workers, kills and resizes, and sums are exact."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks import Hook, Session
from closeranks.core.events import PushesDropped, Restored, StepDone
from closeranks.data.sampling.returned import ReturnedMicroBatches
from closeranks.testing import run_world
from tests.elastic.snapshot_files import shared_memory
from tests.run.generations import Case, Tables, events, losses, run, run_and_die

pytestmark = pytest.mark.world
slow = pytest.mark.slow


@pytest.fixture
def place() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


class OneIsLate(Hook):
    """In each step a random worker is held up in its first forward, long enough for the others to finish."""

    def __init__(self, case: Case, rank: int) -> None:
        self._rank, self._num_workers = rank, case.size - 1
        self._step = -1

    def on_start(self, session: Session) -> None:
        def held_up(*_: Any) -> None:
            index = session._step.index if session._step else 0
            if index != self._step and random.Random(index).randrange(self._num_workers) == self._rank:
                time.sleep(0.15)
            self._step = index

        if self._rank < self._num_workers:
            session.model.register_forward_pre_hook(held_up)


BACKUP: Tables = {
    "sync": {"server": {"count": 1, "backup": 1, "every": 4}},
    "data": {"log_samples": True, "max_bytes": 2000, "eval_fraction": 0.0},
    "train": {"global_batch": 12, "micro_batch": 1, "precision": "float64"},
    "run": {"deterministic": False},
}


def rows(case: Case) -> list[dict[str, Any]]:
    """What was logged as taken, by all ranks."""
    files = sorted((case.folder / "run").rglob("samples-*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def test_one(place: Path) -> None:
    case = Case(place / "run", "data=4", steps=20, tables=BACKUP, hooks=(OneIsLate,))
    t=time.time()
    run(case)
    print(time.time()-t)
    for e in events(case, StepDone): print(e.step, e.loss, e.weight, e.dropped)
    print(events(case, PushesDropped))
    for r in rows(case)[:20]: print({k:r[k] for k in ("step","of_step","micro_batch")})
