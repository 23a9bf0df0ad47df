"""Local SGD replicas against copies of a model that are trained by hand, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from closeranks import Session
from closeranks.testing import run_world
from tests.sync.apart import by_hand, job_of, saved_weights, train

pytestmark = pytest.mark.world

DILOCO: dict[str, Any] = {}
LOCAL_SGD = {"outer_lr": 1.0, "outer_momentum": 0.0}
STREAMING = {"every": 4, "fragments": 2}


def run(layout: str, local: dict[str, Any], folder: Path) -> list[tuple[int, float]]:
    return train(job_of(layout, local), folder)


def assert_as_by_hand(layout: str, num_replicas: int, local: dict[str, Any], folder: Path) -> None:
    local = {"replicas": num_replicas, **local}
    job = job_of(layout, local)
    size = job.layout.data * job.layout.tensor * job.layout.pipeline
    told = run_world(run, size, layout, local, folder, timeout_s=300)
    assert all(one == told[0] for one in told)  # every rank hears of all replicas
    losses, weights = by_hand(job, num_replicas, job.layout.data)
    assert [step for step, _ in told[0]] == list(range(1, 7))
    assert [loss for _, loss in told[0]] == pytest.approx(losses, rel=1e-9)
    found = saved_weights(folder)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert ((found[name] - tensor).norm() / tensor.norm().clamp(min=1e-30)).item() < 1e-9, name


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "num_replicas", "local"),
    [
        ("data=2", 2, DILOCO),
        pytest.param("data=3", 3, STREAMING, marks=slow),
        pytest.param("data=2", 2, LOCAL_SGD, marks=slow),
        pytest.param("data=2", 2, {"nesterov": False, "every": 4}, marks=slow),  # the last round is shorter
        pytest.param("data=4", 2, DILOCO, marks=slow),
        pytest.param("data=4 zero=1", 2, DILOCO, marks=slow),
        pytest.param("data=4 zero=2", 2, STREAMING, marks=slow),
        ("data=4 zero=3", 2, STREAMING),
        pytest.param("data=4 zero=3", 2, DILOCO, marks=slow),
        pytest.param("data=4 zero=1", 2, STREAMING, marks=slow),
        pytest.param("data=2 tensor=2", 2, STREAMING, marks=slow),
        pytest.param("data=2 pipeline=2", 2, STREAMING, marks=slow),
        pytest.param("data=2 zero=3 pipeline=2", 2, DILOCO, marks=slow),
        pytest.param("data=8 zero=3 shard=2", 2, DILOCO, marks=slow),  # replicas of a replica
    ],
)
def test_replicas_do_what_copies_do_by_hand(
    tmp_path: Path, layout: str, num_replicas: int, local: dict[str, Any]
) -> None:
    assert_as_by_hand(layout, num_replicas, local, tmp_path)


def tied_copies(layout: str, folder: Path) -> dict[str, Tensor]:
    job = job_of(layout, {"every": 2}, model={"tied": True}, train={"precision": "float32"})
    with Session.from_job(job, folder) as session:
        for step in session:
            step.run()
        held = [one for one in session.engine.model.applied.held if one.aliases]
        return {one.piece.name: one.parameter.detach().clone() for one in held}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data=3 pipeline=2", "data=3 zero=1 shard=1 pipeline=2"])
def test_both_ends_of_a_pipeline_keep_the_same_bits_of_a_tied_weight(tmp_path: Path, layout: str) -> None:
    """Three replicas: the order in which they are added up matters, and it depends on where a weight lies."""
    found = run_world(tied_copies, 6, layout, tmp_path, timeout_s=300)
    (name,) = found[0]
    assert all(torch.equal(found[0][name], one[name]) for one in found)
