"""``sync.bucket_mib = "auto"``: measured once in a run, the same on all ranks and in all of its generations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks import Hook, Session
from closeranks.core.events import RunStarted
from closeranks.run.worker import generation_cache
from closeranks.telemetry.run_log.recorder import read_events
from closeranks.testing import run_world
from tests.run.trajectories import Trajectory, alone, trajectory

AUTO: dict[str, Any] = {
    "model": {"dropout": 0.2},
    "run": {"deterministic": True},
    "train": {"steps": 3, "global_batch": 12, "micro_batch": 2},
    "sync": {"bucket_mib": "auto"},
}


@dataclass(frozen=True)
class Told:
    """What one rank trained, and in how many buckets."""

    trained: Trajectory
    num_buckets: int
    started: RunStarted


class CountBuckets(Hook):
    num_buckets = 0

    def on_start(self, session: Session) -> None:
        self.num_buckets = len(getattr(session.engine.reducer, "plan", ()))


def train(folder: Path, changes: dict[str, Any], handed_on: dict[str, float]) -> Told:
    """With what an agent would hand on."""
    generation_cache.load_payload(handed_on)
    counter = CountBuckets()
    trained = trajectory(folder, changes, [counter])
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    lines = read_events(folder / "metrics" / f"rank-{rank:05d}.jsonl")
    (started,) = [event for _, event in lines if isinstance(event, RunStarted)]
    return Told(trained, counter.num_buckets, started)


def figures(told: Told) -> tuple[float, float | None, float | None]:
    return told.started.bucket_mib, told.started.link_latency_s, told.started.link_bytes_per_s


@pytest.mark.world
def test_what_was_handed_on_is_trained_with_bit_for_bit(tmp_path: Path) -> None:
    """Three ranks: from there on another plan adds up in another order."""
    first = run_world(train, 3, tmp_path / "first", AUTO, {})
    assert len({figures(told) for told in first}) == 1
    assert first[0].started.bucket_mib >= 0.25
    assert first[0].started.link_bytes_per_s
    handed_on = run_world(train, 3, tmp_path / "handed", AUTO, {"bucket_mib": 0.02})
    assert {figures(told) for told in handed_on} == {(0.02, None, None)}, "it was not measured again"
    named = {**AUTO, "sync": {"bucket_mib": 0.02, "first_bucket_mib": 0.02}}
    by_name = run_world(train, 3, tmp_path / "named", named, {"bucket_mib": 7.0})
    assert handed_on[0].num_buckets == by_name[0].num_buckets > first[0].num_buckets
    assert handed_on[0].trained.losses == by_name[0].trained.losses
    for name, tensor in handed_on[0].trained.weights.items():
        assert torch.equal(tensor, by_name[0].trained.weights[name]), name
    assert by_name[0].started.bucket_mib == 0.02, "what the job names counts"


@pytest.mark.world
@pytest.mark.parametrize(
    ("layout", "num_ranks", "is_measured"),
    [
        ({"tensor": 2, "zero": 1}, 4, True),
        pytest.param({"pipeline": 2}, 4, True, marks=pytest.mark.slow),
        ({"zero": 3}, 2, False),
        pytest.param({"tensor": 2}, 2, False, marks=pytest.mark.slow),
    ],
)
def test_layouts_agree_over_all_ranks_or_measure_nothing(
    tmp_path: Path, layout: dict[str, int], num_ranks: int, is_measured: bool
) -> None:
    changes = {**AUTO, "layout": layout}
    found = run_world(events_of, num_ranks, tmp_path, changes)
    assert len({(one.bucket_mib, one.link_latency_s) for one in found}) == 1
    assert (found[0].bucket_mib > 0, found[0].link_latency_s is not None) == (is_measured, is_measured)


def events_of(folder: Path, changes: dict[str, Any]) -> RunStarted:
    return train(folder, changes, {}).started


def test_one_process_has_nothing_to_measure(tmp_path: Path) -> None:
    trained = alone(tmp_path, AUTO)
    lines = read_events(tmp_path / "metrics" / "rank-00000.jsonl")
    (started,) = [event for _, event in lines if isinstance(event, RunStarted)]
    assert (started.bucket_mib, started.link_latency_s) == (0.0, None)
    assert len(trained.losses) == 3
