"""Local SGD replicas, by hand: copies of a model in one process, plain torch, the published rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from closeranks import Hook, Session
from closeranks.checkpoint.load.catalogue import find_checkpoints
from closeranks.checkpoint.load.resharding_reader import CheckpointReader
from closeranks.core.events import StepDone
from closeranks.core.pieces import Piece
from closeranks.data.sampling.job_order import order_of
from closeranks.data.source import as_loader_source
from closeranks.data.sources.open import open_source
from closeranks.facts.layout import Layout
from closeranks.models.build import spec_for
from closeranks.parallel.initialization.materialize import materialize
from closeranks.run.builder.context import batch_schedule
from closeranks.run.job.job import Job, load_job
from closeranks.run.loop import run_session
from closeranks.run.state.saved_state import MODEL
from closeranks.sync.local_sgd.sync_schedule import assign_fragments

Tables = dict[str, dict[str, Any]]
TABLES: Tables = {
    "model": {"name": "llama", "dim": 16, "num_layers": 4, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 32},
    "data": {"name": "text", "seq_len": 8, "max_bytes": 20_000},
    "train": {"steps": 6, "global_batch": 9, "micro_batch": 1, "precision": "float64", "eval_samples": 1},
    "optim": {
        "lr": 1e-2,
        "clip": 0.5,
        "weight_decay": 0.0,
        "schedule": {"name": "constant", "warmup": 0},
    },
    "sync": {"local": {"every": 2}},
    "checkpoint": {"every": 0},
}


def job_of(layout: str, local: Mapping[str, Any], **changes: dict[str, Any]) -> Job:
    tables = {name: {**TABLES.get(name, {}), **changes.get(name, {})} for name in {**TABLES, **changes}}
    tables["layout"] = asdict(Layout.parse(layout))
    tables["sync"] = {**tables["sync"], "local": {**tables["sync"]["local"], **local}}
    return load_job(None, extra=tables).value


class Losses(Hook):
    def __init__(self) -> None:
        self.steps: list[StepDone] = []

    def on_step(self, session: Session, step: StepDone) -> None:
        self.steps.append(step)


def train(job: Job, folder: Path, hooks: Sequence[Hook] = ()) -> list[tuple[int, float]]:
    """In the world this process stands in; the losses as its ranks were told them."""
    watch = Losses()
    run_session(Session.from_job(job, folder, [watch, *hooks]))
    return [(step.step, step.loss) for step in watch.steps]


def saved_weights(folder: Path) -> dict[str, Tensor]:
    """The model of a run's newest checkpoint, put together."""
    newest = find_checkpoints(str(folder / "checkpoints")).candidates()[0]
    reader = CheckpointReader(newest.storage, newest.name)
    return {key: reader.read(MODEL, key, Piece.whole(key, shape)) for key, shape in reader.shapes(MODEL).items()}


@dataclass
class Replica:
    module: nn.Module
    optimizer: torch.optim.Optimizer


def by_hand(job: Job, num_replicas: int, num_ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all steps and the weights at the end; ``num_ranks`` data ranks share the batch."""
    spec = spec_for(job.model, seq_len=job.data.seq_len)
    source = open_source(job.data, "train", job.run.seed)
    assert source is not None
    order, schedule = order_of(job.data, as_loader_source(source), job.run.seed), batch_schedule(job, len(source))
    local, optim = job.sync.local, job.optim
    replicas = []
    for _ in range(num_replicas):
        module = materialize(
            spec, seed=job.run.seed, device=torch.device("cpu"), dtype=torch.float64, broadcast=lambda tensor: tensor
        )
        rule = torch.optim.AdamW(
            module.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=0.0, foreach=False
        )
        replicas.append(Replica(module, rule))
    names = dict(replicas[0].module.named_parameters())
    fragment_of = assign_fragments({name: p.numel() for name, p in names.items()}, spec.blocks, local.fragments)
    anchor = {name: p.detach().clone() for name, p in names.items()}
    momentum = {name: torch.zeros_like(p) for name, p in anchor.items()}
    losses = []
    for step in range(schedule.num_steps):
        total = weight = 0.0
        for number, replica in enumerate(replicas):
            share = num_ranks // num_replicas
            ranks = range(number * share, (number + 1) * share)
            own = [one for rank in ranks for one in schedule.assigned(step, rank, num_ranks)]
            parts = [spec.loss(replica.module, source.read(order.between(one.first, one.last))) for one in own]
            replica.optimizer.zero_grad()
            own_weight = float(sum(one.weight for one in parts))
            own_total = torch.stack([one.total for one in parts]).sum()
            (own_total / own_weight).backward()
            torch.nn.utils.clip_grad_norm_(replica.module.parameters(), optim.clip)
            replica.optimizer.step()
            total, weight = total + own_total.item(), weight + own_weight
        losses.append(total / weight)
        meeting = step + 1
        gap = local.every // local.fragments
        for name in anchor:
            is_last = meeting == schedule.num_steps
            if not is_last and (meeting % gap or (meeting // gap - 1) % local.fragments != fragment_of[name]):
                continue
            copies = [dict(replica.module.named_parameters())[name] for replica in replicas]
            gradient = torch.stack([anchor[name] - copy.detach() for copy in copies]).mean(0)
            momentum[name] = local.outer_momentum * momentum[name] + gradient
            ahead = gradient + local.outer_momentum * momentum[name] if local.nesterov else momentum[name]
            anchor[name] = anchor[name] - local.outer_lr * ahead
            with torch.no_grad():
                for copy in copies:
                    copy.copy_(anchor[name])
    return losses, anchor
