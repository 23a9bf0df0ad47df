"""torchrec beside ``benchmarks/recommender.py``: the same recommender on two ranks, its tables sharded by torchrec.

Run by a Python that has torchrec and fbgemm-gpu-cpu. Prints steps per second, and the loopback's bytes of a step.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from recommender_work import mark, rates
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from closeranks.data.sources.open import open_source
from closeranks.facts.shapes.recommender import RecommenderShape
from closeranks.models.recommender.model import Mlp
from closeranks.run.job.job import load_job

NUM_RANKS = 2


class Peer(nn.Module):
    """``models.recommender.model.Recommender`` over an ``EmbeddingBagCollection``."""

    def __init__(self, shape: RecommenderShape) -> None:
        super().__init__()
        self.features, self.dim = shape.features, shape.dim
        self.bottom, self.top = Mlp(shape.bottom_widths), Mlp(shape.top_widths)
        configs = [
            EmbeddingBagConfig(
                name=f"t{n}", embedding_dim=shape.dim, num_embeddings=shape.rows, feature_names=[f"f{n}"]
            )
            for n in range(shape.features)
        ]
        self.tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        first = self.bottom(dense)
        pooled = self.tables(ids).values().view(-1, self.features, self.dim)
        stacked = torch.cat([first.unsqueeze(1), pooled], dim=1)
        dots = stacked @ stacked.transpose(1, 2)
        row, column = torch.triu_indices(self.features + 1, self.features + 1, 1)
        logits: Tensor = self.top(torch.cat((first, dots[:, row, column]), dim=1))
        return logits.squeeze(1)


def jagged(ids: Tensor) -> KeyedJaggedTensor:
    """Bags [batch, features, n] with -1 for no id."""
    bags = ids.transpose(0, 1)
    is_there = bags >= 0
    keys = [f"f{n}" for n in range(bags.shape[0])]
    return KeyedJaggedTensor.from_lengths_sync(keys, bags[is_there], is_there.sum(-1).view(-1).int())


def rank_of_peer(rank: int, tables: dict[str, Any]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    job = load_job(None, extra=tables).value
    cpu, source = torch.device("cpu"), open_source(job.data, "train", job.run.seed)
    model = Peer(job.model.shape())  # type: ignore[union-attr]
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": 0.05})
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=NUM_RANKS, compute_device="cpu"))
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    plan = planner.collective_plan(model, None, dist.group.WORLD)
    parallel = DistributedModelParallel(model, env=env, device=cpu, plan=plan)
    adamw = torch.optim.AdamW([p for name, p in parallel.named_parameters() if "tables" not in name], lr=job.optim.lr)
    steps, share = job.train.steps or 0, job.train.global_batch // NUM_RANKS
    batches = [
        source.read(np.arange(at, at + share)) for at in range(rank * share, steps * share * NUM_RANKS, share * 2)
    ]
    at = []
    for batch in batches:
        logits = parallel(batch["dense"], jagged(batch["ids"]))
        nn.functional.binary_cross_entropy_with_logits(logits, batch["click"]).backward()
        nn.utils.clip_grad_norm_([p for group in adamw.param_groups for p in group["params"]], job.optim.clip)
        adamw.step()
        adamw.zero_grad()
        at.append(mark())
    found = rates(at)
    if rank == 0:
        sys.stdout.write(f"{found['steps_per_s']} {found['bytes_a_step']}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank_of_peer, (json.loads(sys.argv[1]),), NUM_RANKS)
