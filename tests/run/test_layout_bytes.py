"""What ranks hold and send is what ``facts`` says: bytes and calls as measured, not as computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks import Session
from closeranks.core.events import StepPhases
from closeranks.facts.communication.comm_volume import CollectiveVolume
from closeranks.facts.layout import Layout
from closeranks.facts.mesh import Mesh
from closeranks.plan.layouts import RankCost, layout_cost
from closeranks.run.job.describe import describe_job
from closeranks.run.job.job import Job, load_job
from closeranks.testing import run_world
from tests.run.counted import num_params
from tests.run.small import of_kind
from tests.run.traffic import Kind, Traffic

pytestmark = pytest.mark.world

TABLES: dict[str, dict[str, Any]] = {
    "model": {"name": "llama", "dim": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 96},
    "data": {"name": "text", "seq_len": 16, "max_bytes": 20_000},
    "train": {"steps": 3, "global_batch": 16, "micro_batch": 2, "eval_samples": 1},
    "sync": {"bucket_mib": 0.1, "first_bucket_mib": 0.02},
    "checkpoint": {"save": False},
}
PARTIAL = ("gradients of norms", "gradients of tied weights")
AXES = {"data": ("replica", "shard"), "world": ("pipeline", "replica", "shard", "tensor")}


def job_of(text: str, changes: dict[str, dict[str, Any]]) -> Job:
    layout = Layout.parse(text)
    tables = {**TABLES, "layout": asdict(layout)}
    for name, table in changes.items():
        tables[name] = {**tables.get(name, {}), **table}
    return load_job(None, extra=tables).value


def second_step(folder: Path, job: Job) -> tuple[dict[Kind, int], dict[Kind, int], StepPhases]:
    """Calls and bytes of one step, the second (in the first, stages tell each other what they will send), and what the
    run recorded of it."""
    torch.set_num_threads(1)
    with Session.from_job(job, folder) as session:
        steps = iter(session)
        next(steps).run()
        step = next(steps)
        with Traffic() as traffic:
            step.run()
            last = next(steps)  # commits the step
        last.run()
        assert list(steps) == []
    calls = {kind: count for kind, count in traffic.calls.items() if len(kind.ranks) > 1}
    recorded = next(one for one in of_kind(folder, StepPhases, session.world.rank) if one.step == 2)
    return calls, {kind: traffic.payload[kind] for kind in calls}, recorded


def expected(cost: RankCost, layout: Layout, rank: int) -> tuple[dict[Kind, int], dict[Kind, int]]:
    calls: dict[Kind, int] = {}
    payload: dict[Kind, int] = {}
    for row in cost.volumes:
        kind = Kind(row.operation, ranks_of(row, layout, rank))
        calls[kind] = calls.get(kind, 0) + row.calls
        payload[kind] = payload.get(kind, 0) + row.payload_bytes
    return calls, payload


def counted(volumes: Sequence[CollectiveVolume]) -> tuple[dict[str, int], dict[str, int]]:
    """What the counters of a step should show: by the names of phases, without the vote."""
    num_bytes: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for row in volumes:
        if row.axis != "world":
            axis = "partial" if row.what in PARTIAL else {"shard": "data", "replica": "data"}.get(row.axis, row.axis)
            name = f"{axis}.{row.operation.replace('-', '_')}"
            num_bytes[name] += row.sent_bytes
            calls[name] += row.calls
    return dict(num_bytes), dict(calls)


def ranks_of(row: CollectiveVolume, layout: Layout, rank: int) -> tuple[int, ...]:
    return Mesh(layout).group_of(rank, *AXES.get(row.axis, (row.axis,)))


TRAFFIC: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "replicas": ("data=2", {}),
    "zero 1": ("data=2 zero=1", {}),
    "zero 2": ("data=2 zero=2", {}),
    "zero 2, once a step": ("data=2 zero=2", {"layout": {"hold": "step"}}),
    "zero 3": ("data=2 zero=3", {}),
    "zero 3, once a step": ("data=2 zero=3", {"layout": {"hold": "step"}}),
    "hsdp": ("data=4 zero=3 shard=2", {}),
    "hsdp in flat shards": ("data=4 zero=1 shard=2", {}),
    "split": ("tensor=2", {}),
    "split, recomputed": ("tensor=2", {"train": {"recompute": "full"}}),
    "stages": ("pipeline=2", {}),
    "stages of a V": ("pipeline=2 schedule=zbv", {}),
    "tied stages": ("data=2 pipeline=2", {"model": {"tied": True}}),
    "split replicas": ("data=2 tensor=2", {}),
    "split and sharded": ("data=2 zero=3 tensor=2", {}),
    "bf16": ("data=2 zero=3 tensor=2", {"train": {"precision": "bf16"}}),
    "everything": ("data=2 zero=3 tensor=2 pipeline=2", {}),
}


SELDOM = {
    *("zero 2, once a step", "zero 3, once a step", "hsdp in flat shards", "split, recomputed", "stages of a V"),
    *("split replicas", "split and sharded", "bf16"),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SELDOM)) for case in TRAFFIC])
def test_calls_and_bytes_on_the_wire_are_what_facts_says(tmp_path: Path, case: str) -> None:
    text, changes = TRAFFIC[case]
    job, layout = job_of(text, changes), Layout.parse(text)
    measured = run_world(second_step, layout.num_ranks, tmp_path, job, timeout_s=300)
    cost = layout_cost(describe_job(job), layout)
    for rank, (calls, payload, recorded) in enumerate(measured):
        volumes = cost.ranks[Mesh(layout).coordinate(rank).pipeline].volumes
        assert (recorded.sent_bytes, recorded.calls) == counted(volumes), f"rank {rank}"
        told = {kind: count for kind, count in calls.items() if kind.operation != "receive"}
        want = expected(cost.ranks[Mesh(layout).coordinate(rank).pipeline], layout, rank)
        assert told == want[0], f"rank {rank}"
        assert {kind: payload[kind] for kind in told} == want[1], f"rank {rank}"


def test_replicas_send_the_ring_formula_once_per_step_however_they_accumulate(tmp_path: Path) -> None:
    """2(N-1)/N of the model's bytes, with four micro-batches or one."""
    layout = Layout.parse("data=2")
    found = []
    for micro in (2, 8):
        job = job_of("data=2", {"train": {"micro_batch": micro}})
        calls, payload, _ = run_world(second_step, 2, tmp_path / str(micro), job)[0]
        found.append((calls, payload))
        rows = layout_cost(describe_job(job), layout).ranks[0].volumes
        gradients = next(row for row in rows if row.what == "gradients")
        num_bytes = num_params(describe_job(job).structure) * 4
        assert gradients.payload_bytes == num_bytes
        assert gradients.sent_bytes == num_bytes
    assert found[0] == found[1]
