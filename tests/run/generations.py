"""Runs that are killed and taken over, without an agent: each generation is a world of its own on the same boxes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks import Hook, Session
from closeranks.core.events import Event, StepDone
from closeranks.core.requests import DRAIN, REGROUP, RunRequest
from closeranks.core.system import failpoints
from closeranks.core.system.environment import detect_world, set_world
from closeranks.elastic.snapshot_paths import SnapshotPaths
from closeranks.facts.layout import Layout
from closeranks.run.job.job import load_job
from closeranks.run.loop import run_session
from closeranks.run.worker.agent_client import StandaloneClient, configure_worker
from closeranks.telemetry.run_log.recorder import read_events
from closeranks.testing import WorldError, run_world
from tests.elastic.snapshot_files import make_snapshot_files
from tests.run import buffered_models

Tables = dict[str, dict[str, Any]]

TABLES: Tables = {
    "model": {
        "name": "llama",
        "dim": 32,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_dim": 64,
        "dropout": 0.1,
    },
    "data": {"name": "text", "seq_len": 16, "max_bytes": 20_000},
    "train": {"global_batch": 12, "micro_batch": 1, "eval_samples": 1, "precision": "float32"},
    "optim": {"lr": 1e-2, "clip": 1.0, "schedule": {"name": "constant", "warmup": 0}},
    "checkpoint": {"every": 0},
    "run": {"deterministic": True},
    "elastic": {"snapshot_every": 1},
}


@dataclass(frozen=True)
class Case:
    """A run over several generations."""

    folder: Path
    layout: str = "data=2"
    steps: int = 6
    tables: Tables = field(default_factory=dict)
    generation: int = 0
    hosts: tuple[int, ...] = ()
    """One for each rank; empty: one host."""
    deaths: tuple[tuple[int, str], ...] = ()
    """Rank and the point at which it is killed: ``slot.in_data:3``, or ``step:4`` for the end of a step."""
    regroup_at: int = 0
    drain_at: int = 0
    hooks: tuple[type[Any], ...] = ()
    """Made with the case and the rank."""
    is_buffered: bool = False
    """Whether a user's model with batch norm is trained instead."""

    @property
    def size(self) -> int:
        return Layout.parse(self.layout).num_ranks

    def boxes(self, host: int) -> tuple[tuple[str, ...], ...]:
        (self.folder / f"host-{host}").mkdir(parents=True, exist_ok=True)
        return make_snapshot_files(self.folder / f"host-{host}", max(self.size, 4))


class Asking(StandaloneClient):
    """As if an agent asked for something at a step."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case, self._num_polls = case, 0
        self.kept_steps: list[int] = []

    def poll(self) -> frozenset[RunRequest]:
        self._num_polls += 1
        at = {DRAIN: self._case.drain_at, REGROUP: self._case.regroup_at}
        return frozenset(request for request, step in at.items() if step == self._num_polls)

    def note_snapshot(self, step: int) -> None:
        self.kept_steps.append(step)


class Outside(Hook):
    """Writes down losses and the last state, and dies where it is told to."""

    def __init__(self, case: Case, rank: int) -> None:
        self._case, self._rank = case, rank

    def on_step(self, session: Session, step: StepDone) -> None:
        with (self._case.folder / f"losses-{self._rank}.jsonl").open("a") as file:
            file.write(json.dumps([step.step, step.loss, step.grad_norm]) + "\n")
        if (self._rank, f"step:{step.step}") in self._case.deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_end(self, session: Session) -> None:
        state = {f"{one.section}/{one.key}": one.tensor.clone() for one in session.state.tensors()}
        torch.save(state, self._case.folder / f"state-{self._rank}.pt")


def live(case: Case) -> dict[str, Any]:
    """One rank of one generation."""
    world = detect_world()
    hosts = case.hosts or (0,) * world.size
    host = hosts[world.rank]
    local, size = hosts[: world.rank].count(host), hosts.count(host)
    set_world(replace(world, generation=case.generation, hosts=hosts, local_rank=local, local_size=size))
    for rank, label in case.deaths:
        if rank == world.rank and not label.startswith("step:"):
            name, _, passing = label.partition(":")
            failpoints._REQUESTED = (name, int(passing or 1))
    client = Asking(case)
    configure_worker(agent_client=client, snapshot_paths=SnapshotPaths(case.boxes(host), local))
    session = buffered(case, world.rank) if case.is_buffered else told(case, world.rank)
    result = run_session(session)
    return {
        "reason": result.reason,
        "steps": result.steps,
        "kept": client.kept_steps,
        "has_regrouped": client.has_regrouped,
    }


def tables_of(case: Case) -> Tables:
    layout = {"layout": asdict(Layout.parse(case.layout))}
    merged = {
        name: {**_base(name, case.tables), **layout.get(name, {}), **case.tables.get(name, {})}
        for name in {**TABLES, **layout, **case.tables}
    }
    merged["train"]["steps"] = case.steps
    return merged


def _base(name: str, tables: Tables) -> dict[str, Any]:
    """Nothing where a case names another model or other data."""
    return {} if name in ("model", "data") and "name" in tables.get(name, {}) else TABLES.get(name, {})


def told(case: Case, rank: int) -> Session:
    job = load_job(None, extra=tables_of(case)).value
    return Session.from_job(job, case.folder / "run", [Outside(case, rank), *(hook(case, rank) for hook in case.hooks)])


def buffered(case: Case, rank: int) -> Session:
    tables = {name: table for name, table in tables_of(case).items() if name not in ("model", "data")}
    tables["run"] = {**tables["run"], "folder": str(case.folder / "run")}
    tables["checkpoint"] = {**tables["checkpoint"], "resume": "auto"}
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(2))
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    return Session(buffered_models.Buffered, data, buffered_models.loss, hooks=[Outside(case, rank)], **tables)


def run(case: Case) -> list[dict[str, Any]]:
    return run_world(live, case.size, case, timeout_s=300)


def run_and_die(case: Case) -> None:
    with pytest.raises(WorldError, match="SIGKILL"):
        run(case)


def state(case: Case, rank: int) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(case.folder / f"state-{rank}.pt")
    return loaded


def losses(case: Case, rank: int = 0) -> dict[int, list[float]]:
    """By step; of a step that was done twice, the last."""
    lines = (case.folder / f"losses-{rank}.jsonl").read_text().splitlines()
    return {step: numbers for step, *numbers in map(json.loads, lines)}


def assert_same(case: Case, other: Case) -> None:
    """Bit for bit, on every rank: weights, buffers, what the optimizer remembers, and the losses on the way."""
    for rank in range(case.size):
        one, two = state(case, rank), state(other, rank)
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            same = torch.equal(tensor.reshape(-1).view(torch.uint8), two[name].reshape(-1).view(torch.uint8))
            assert same, f"rank {rank}: {name}"
        assert losses(case, rank) == losses(other, rank)


def events(case: Case, kind: type[Event], rank: int = 0) -> list[Any]:
    lines = read_events(case.folder / "run" / "metrics" / f"rank-{rank:05d}.jsonl")
    return [event for _, event in lines if isinstance(event, kind)]


def files(case: Case, host: int) -> Sequence[str]:
    return [path for box in case.boxes(host) for path in box]
