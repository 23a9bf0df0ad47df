"""What the processes of ``benchmarks/recommender.py`` do: train with servers, in a plain loop, or in a DDP loop.

All of them train the recommender on the same click log. Rates leave out the first steps, in which memory is allocated.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks import Hook, Session
from closeranks.core.events import StepDone, StepPhases
from closeranks.core.protocols import Batch
from closeranks.data.sources.open import open_source
from closeranks.models.build import spec_for
from closeranks.models.recommender.auc import roc_auc
from closeranks.optim.lr_schedule import lr_factor
from closeranks.optim.row_rules import RowAdagrad
from closeranks.parallel.initialization.materialize import materialize
from closeranks.run.components.sync.kept_tables import KeptTables
from closeranks.run.job.job import Job, load_job
from closeranks.sync.rows.row_messages import PULL_PHASE, PUSH_PHASE
from closeranks.telemetry.run_log.recorder import read_events

_SENT = 9
"""The column of bytes sent, after the name and eight columns of what was received."""
_SKIPPED = 4
"""Steps before the clock starts."""
_INTERFACES = Path("/proc/net/dev")
"""Of the network namespace of this process."""


class Clock(Hook):
    def __init__(self) -> None:
        self.at: list[tuple[float, int]] = []
        """By step: the time, and what the loopback had sent."""

    def on_step(self, session: Session, step: StepDone) -> None:
        self.at.append(mark())


def mark() -> tuple[float, int]:
    loopback = next(line for line in _INTERFACES.read_text().splitlines() if line.strip().startswith("lo:"))
    return time.perf_counter(), int(loopback.split()[_SENT])


def rates(at: list[tuple[float, int]]) -> dict[str, float]:
    (began, before), (ended, after), steps = at[_SKIPPED - 1], at[-1], len(at) - _SKIPPED
    return {"steps_per_s": steps / (ended - began), "bytes_a_step": (after - before) / steps}


def served(folder: Path, tables: dict[str, Any], limited: str) -> dict[str, Any]:
    """One rank of a run. ``limited``: the file that moves a process into the workers' control group."""
    job: Job = load_job(None, extra=tables).value
    rank, num_servers = dist.get_rank(), job.sync.server.count
    if limited and rank < dist.get_world_size() - num_servers:
        Path(limited).write_text("0")
    clock, began = Clock(), mark()[1]
    with Session.from_job(job, folder, [clock]) as session:
        for step in session:
            step.run()
        result = session.result
        kept = [one for one in session.engine.components if isinstance(one, KeptTables)]
        stores = [store for one in kept for store in one.stores]
    told = [one for _, one in read_events(folder / "metrics" / f"rank-{rank:05d}.jsonl") if isinstance(one, StepPhases)]
    row_bytes = sum(one.sent_bytes.get(name, 0) for one in told for name in (PULL_PHASE, PUSH_PHASE))
    return {
        **(rates(clock.at) if len(clock.at) > _SKIPPED else {}),
        **(result.eval.metrics if result.eval else {}),
        "kept_bytes": sum(store.num_bytes for store in stores),
        "num_rows": sum(store.num_rows for store in stores),
        "row_bytes": row_bytes,
        "loopback_bytes": mark()[1] - began,
    }


def dense_loop(tables: dict[str, Any]) -> dict[str, float]:
    """One process, plain torch: dense tables, AdamW for the rest, row-wise Adagrad for whole tables. A row without a
    gradient stays as it is under that rule."""
    job: Job = load_job(None, extra=tables).value
    model, spec = build(job), spec_for(job.model, seq_len=0)
    source, held_out = open_source(job.data, "train", job.run.seed), open_source(job.data, "eval", job.run.seed)
    assert held_out is not None
    untrained = evaluated(model, held_out.read(np.arange(len(held_out))))
    rows = {name: p for name, p in model.named_parameters() if name.startswith("tables.")}
    others = [p for name, p in model.named_parameters() if name not in rows]
    adamw = torch.optim.AdamW(others, lr=job.optim.lr, betas=job.optim.betas, eps=job.optim.eps, weight_decay=0.0)
    rule, peak = RowAdagrad(), job.optim.tables.lr or job.optim.lr
    states = {name: rule.init_state(table.detach()) for name, table in rows.items()}
    steps, batch_size = job.train.steps or 0, job.train.global_batch
    for step in range(steps):
        batch = source.read(np.arange(step * batch_size, (step + 1) * batch_size))
        loss = spec.loss(model, batch)
        (loss.total / float(loss.weight)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.optim.clip)
        factor = scheduled(job, step, steps)
        for group in adamw.param_groups:
            group["lr"] = job.optim.lr * factor
        adamw.step()
        for name, table in rows.items():
            assert table.grad is not None
            after, states[name] = rule.update(table.detach(), states[name], table.grad, lr=peak * factor)
            with torch.no_grad():
                table.copy_(after)
        model.zero_grad()
    return {"auc": evaluated(model, held_out.read(np.arange(len(held_out)))), "untrained_auc": untrained}


def plain_ddp(tables: dict[str, Any]) -> dict[str, float]:
    """The loop that everybody writes: DistributedDataParallel, dense gradients, torch's Adagrad. Its batches are drawn
    before the clock starts."""
    job: Job = load_job(None, extra=tables).value
    rank, size = dist.get_rank(), dist.get_world_size()
    model, spec, source = build(job), spec_for(job.model, seq_len=0), open_source(job.data, "train", job.run.seed)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(parallel.parameters(), lr=job.optim.lr)
    steps, share = job.train.steps or 0, job.train.global_batch // size
    first = [step * share * size + rank * share for step in range(steps)]
    batches = [source.read(np.arange(at, at + share)) for at in first]
    at = []
    for batch in batches:
        loss = spec.loss(parallel, batch)
        (loss.total / float(loss.weight)).backward()
        nn.utils.clip_grad_norm_(parallel.parameters(), job.optim.clip)
        optimizer.step()
        optimizer.zero_grad()
        at.append(mark())
    return rates(at)


def build(job: Job) -> nn.Module:
    """With the weights that a run starts from."""
    spec = spec_for(job.model, seq_len=0)
    cpu = torch.device("cpu")
    return materialize(spec, seed=job.run.seed, device=cpu, dtype=torch.float32, broadcast=lambda one: one)


def scheduled(job: Job, step: int, steps: int) -> float:
    return lr_factor(job.optim.schedule, step, steps)


@torch.no_grad()
def evaluated(model: nn.Module, batch: Batch) -> float:
    scores: Tensor = model(batch["dense"], batch["ids"])
    return roc_auc(scores, batch["click"])


def touched_rows(tables: dict[str, Any]) -> int:
    """The distinct rows of each micro-batch of a run with one worker, added up."""
    job: Job = load_job(None, extra=tables).value
    source, size, total = open_source(job.data, "train", job.run.seed), job.train.global_batch, 0
    for step in range(job.train.steps or 0):
        ids = source.read(np.arange(step * size, (step + 1) * size))["ids"]
        total += sum(len(torch.unique(one[one >= 0])) for one in ids.unbind(1))
    return total
