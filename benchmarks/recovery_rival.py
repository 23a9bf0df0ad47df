"""What a careful person writes to survive a fault with torchrun: DDP or FSDP2, the state in memory after every step.

Run by ``benchmarks/recovery.py`` under torchrun. Each rank writes a line when it has finished a step. The state goes to
/dev/shm, in whole files that are renamed into place, and the newest step that all ranks have is loaded at a start.

    torchrun --standalone --nproc-per-node 4 --max-restarts 9 benchmarks/recovery_rival.py ddp FOLDER STATES
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

DIM, NUM_LAYERS, NUM_HEADS, FFN_DIM, VOCAB, SEQ_LEN, BATCH = 128, 4, 16, 256, 256, 64, 2


class Model(nn.Module):
    """As large as the job it is compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        options: dict[str, Any] = {"dropout": 0.1, "batch_first": True, "norm_first": True}
        layers = (nn.TransformerEncoderLayer(DIM, NUM_HEADS, FFN_DIM, **options) for _ in range(NUM_LAYERS))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


class States:
    """The last states, by step: one of all ranks under DDP, one of each under FSDP2."""

    def __init__(self, folder: Path, owner: int, num_owners: int) -> None:
        self._folder, self._owner, self._num_owners = folder, owner, num_owners

    def save(self, step: int, state: dict[str, Any]) -> None:
        path = self._path(step)
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        self._path(step - 3).unlink(missing_ok=True)

    def newest(self) -> int:
        """The newest step that all have; 0 where there is none."""
        steps = [int(path.name.split("-")[0]) for path in self._folder.glob("*.pt")]
        return max((step for step in set(steps) if steps.count(step) == self._num_owners), default=0)

    def load(self, step: int) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(self._path(step), weights_only=False)
        return state

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}-{self._owner}.pt"


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Model()
    if kind == "fsdp2":
        for layer in model.get_submodule("layers").children():
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def own_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What this rank holds: plain tensors, so that a state of shards needs no group to be read."""
    moments = [{key: local(value) for key, value in state.items()} for state in optimizer.state.values()]
    return {"weights": [local(tensor) for tensor in model.parameters()], "moments": moments}


def put_back(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    with torch.no_grad():
        for tensor, value in zip(model.parameters(), state["weights"], strict=True):
            local(tensor).copy_(value)
            tensor.grad = torch.zeros_like(tensor)
        optimizer.step()  # makes the moments, which are then overwritten as the weights are
        for tensor, value in zip(model.parameters(), state["weights"], strict=True):
            local(tensor).copy_(value)
    for moments, saved in zip(optimizer.state.values(), state["moments"], strict=True):
        for key, value in saved.items():
            local(moments[key]).copy_(value)
    optimizer.zero_grad()


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value.detach()


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(VOCAB, (BATCH, SEQ_LEN + 1), generator=generator)
    torch.manual_seed(step)
    logits = model(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    rank, is_sharded = dist.get_rank(), kind == "fsdp2"
    states = States(Path(sys.argv[3]), rank if is_sharded else 0, dist.get_world_size() if is_sharded else 1)
    model, optimizer = build(kind)
    newest = torch.tensor(states.newest())
    dist.broadcast(newest, 0)
    step = int(newest)
    if step:
        put_back(model, optimizer, states.load(step))
    with (folder / f"rank-{rank}.jsonl").open("a", buffering=1) as lines:
        while True:
            step_once(model, optimizer, step, rank)
            step += 1
            record = {"attempt": attempt, "step": step, "at": time.monotonic(), "pid": os.getpid()}
            lines.write(json.dumps(record) + "\n")
            if is_sharded or rank == 0:
                states.save(step, own_state(model, optimizer))


if __name__ == "__main__":
    main()
