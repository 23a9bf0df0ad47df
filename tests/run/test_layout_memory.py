"""What a rank keeps in memory, by the bytes of its tensors: its state, activations in flight, and while it is built."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from closeranks import Session
from closeranks.facts.layout import Layout
from closeranks.facts.pipeline.schedules import schedule_for
from closeranks.facts.pipeline.timeline import peak_in_flight
from closeranks.models.build import spec_for
from closeranks.optim.optimizer import freeze
from closeranks.parallel.apply import local_part, parallelize
from closeranks.parallel.mesh_groups import open_mesh_groups
from closeranks.parallel.process_group import RankGroup
from closeranks.plan.layouts import layout_cost
from closeranks.run.builder.parallelize import parallel_settings
from closeranks.run.components.optimizer import OptimizerStep
from closeranks.run.dry_run.live_bytes import LiveBytes
from closeranks.run.job.describe import describe_job
from closeranks.run.job.job import Job, load_job
from closeranks.testing import run_world
from tests.run.counted import num_params

pytestmark = pytest.mark.world

TABLES: dict[str, dict[str, Any]] = {
    "model": {"name": "llama", "dim": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 384},
    "data": {"name": "text", "seq_len": 8, "max_bytes": 20_000},
    "train": {"steps": 3, "global_batch": 16, "micro_batch": 2, "eval_samples": 1},
    "sync": {"bucket_mib": 0.02, "first_bucket_mib": 0.02},
    "checkpoint": {"save": False},
}


def job_of(text: str) -> Job:
    layout = Layout.parse(text)
    return load_job(None, extra={**TABLES, "layout": asdict(layout)}).value


@dataclass(frozen=True)
class Measured:
    weights: int
    optimizer: int
    within_step: int
    """All that lives between two micro-batches."""


def measure(folder: Path, job: Job) -> Measured:
    torch.set_num_threads(1)
    with LiveBytes() as live, Session.from_job(job, folder) as session:
        steps = iter(session)
        next(steps).run()
        step = next(steps)
        batches = iter(step)
        step.backward(session.loss(next(batches)))
        gc.collect()
        within_step = live.current
        for batch in batches:
            step.backward(session.loss(batch))
        next(steps).run()
        list(steps)
        weights = sum(one.tensor.numel() * one.tensor.element_size() for one in session.engine.model.local_tensors())
        memory = sum(
            tensor.numel() * tensor.element_size()
            for _, _, tensor in session.engine.components.get(OptimizerStep).optimizer.state_tensors()
        )
    return Measured(weights, memory, within_step)


UNDER_WAY = ("gradients in flight", "slices arriving", "gradients being scattered")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_keeps_what_the_formulas_say(tmp_path: Path, zero: int) -> None:
    """Four ranks: weights, gradients and optimizer state within 5%; what lies beside them is named and small."""
    job, layout = job_of(f"data=4 zero={zero}"), Layout.parse(f"data=4 zero={zero}")
    subject = describe_job(job)
    rank = layout_cost(subject, layout).ranks[0]
    state = rank.state
    whole = num_params(subject.structure) * 4
    share = {1: (1.0, 1.0, 0.5), 2: (1.0, 0.25, 0.5), 3: (0.25, 0.25, 0.5)}[zero]
    assert (state.parameters, state.gradients, state.optimizer) == pytest.approx(
        [part * whole for part in share], rel=0.05
    )
    for measured in run_world(measure, 4, tmp_path, job):
        assert measured.weights == pytest.approx(state.parameters, rel=0.05)
        assert measured.optimizer == pytest.approx(state.optimizer, rel=0.05)
        travelling = sum(part.num_bytes for part in rank.buffers if part.name in UNDER_WAY)
        expected = state.parameters + state.padding + state.optimizer + rank.gradient_bytes
        assert 0.95 * expected < measured.within_step < 1.05 * expected + travelling


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zbv"])
def test_stages_hold_as_many_micro_batches_as_the_schedule_says(tmp_path: Path, schedule: str) -> None:
    bound = peak_in_flight(schedule_for(schedule, 2, 8))
    assert run_world(most_held, 2, tmp_path, job_of(f"pipeline=2 schedule={schedule}")) == list(bound)


def most_held(folder: Path, job: Job) -> int:
    torch.set_num_threads(1)
    with Session.from_job(job, folder) as session:
        for step in session:
            step.run()
        assert session.engine.model.pipeline is not None
        return session.engine.model.pipeline.peak_held


@dataclass(frozen=True)
class Built:
    peak: int
    own: int
    largest: int
    whole: int


def build(text: str) -> Built:
    """Peak bytes while the model is built, cut and filled."""
    torch.set_num_threads(1)
    job, layout, device = job_of(text), Layout.parse(text), torch.device("cpu")
    spec = spec_for(job.model, seq_len=job.data.seq_len)
    groups = open_mesh_groups(RankGroup(dist.get_rank(), dist.get_world_size()), layout, device, timeout_s=60.0)
    with LiveBytes() as live:
        applied = parallelize(
            spec, parallel_settings(job, layout), groups, device, lambda module: freeze(module, job.optim)
        )
        sizes = {name: torch.Size(shape).numel() * 4 for name, shape in applied.shapes.items()}
        own = sum(local_part(held, groups.shard)[0].numel() * 4 for held in applied.held)
        return Built(live.peak, own, max(sizes.values()), sum(sizes.values()))


@pytest.mark.parametrize("text", ["data=4 zero=3", "tensor=4", "pipeline=4", "data=2 zero=3 pipeline=2"])
def test_no_rank_holds_more_than_its_pieces_and_one_parameter_while_the_model_is_built(text: str) -> None:
    for built in run_world(build, 4, text):
        assert built.own < 0.45 * built.whole
        assert built.peak < built.own + 2 * built.largest + 64_000
        assert built.peak < 0.7 * built.whole
