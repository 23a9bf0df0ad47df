"""A small model under torch's own ways to spread it, and its state through DCP: what ranks of test worlds run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from closeranks.checkpoint.dcp.storage_reader import CheckpointStorageReader
from closeranks.checkpoint.dcp.storage_writer import CheckpointStorageWriter

Flat = dict[str, Any]


class Toy(nn.Module):
    """Rows that four ranks cannot share evenly, a weight that leaves one of them nothing, a buffer and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)
        self.head = nn.Linear(8, 3)
        self.register_buffer("table", torch.arange(5))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens))
        out: Tensor = self.head(hidden + self.down(torch.relu(self.up(hidden)))) * self.scale
        return out


def build(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Toy()
    if layout in ("dp2", "dp4"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh)
    if layout in ("tp2", "tp2dp2"):
        shape = (1, 2) if layout == "tp2" else (2, 2)
        both = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        parallelize_module(model, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if layout == "tp2dp2":
            for part in (model.up, model.down, model):
                fully_shard(part, mesh=both["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5, 6]])
    model(tokens).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), "epoch": 3}


def whole(state: dict[str, Any]) -> Flat:
    """Everything by DCP's names, tensors whole."""
    flat, _ = flatten_state_dict(state)
    return {name: one.full_tensor().clone() if isinstance(one, DTensor) else one for name, one in flat.items()}


def save_all(folder: str) -> Flat:
    """Four ranks: a trained TP2xDP2 state into our format, the same from DP4, and by torch's own writer."""
    model, optimizer = build("tp2dp2", 0)
    step(model, optimizer)
    state = state_of(model, optimizer)
    writer = CheckpointStorageWriter(f"{folder}/ours", 1, tree={"who": "test"}, layout="tp2dp2")
    dcp.save(state, storage_writer=writer)
    saved = whole(state)
    other = state_of(*build("dp4", 1))
    dcp.load(other, storage_reader=CheckpointStorageReader(f"{folder}/ours/step-00000001"))
    dcp.save(other, storage_writer=CheckpointStorageWriter(f"{folder}/ours", 2))
    dcp.save(other, checkpoint_id=f"{folder}/torch")
    return saved


def load_into(layouts: list[str], place: str) -> dict[str, tuple[Flat, Flat]]:
    """Into fresh models of these layouts: what DCP put into the state dict, and what the model then had."""
    found = {}
    for number, layout in enumerate(layouts):
        model, optimizer = build(layout, 10 + number)
        state = {**state_of(model, optimizer), "epoch": 0}
        dcp.load(state, storage_reader=CheckpointStorageReader(place))
        loaded = whole(state)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        found[layout] = loaded, whole({"model": get_model_state_dict(model)})
    return found


def refused_save(folder: str) -> str:
    """One rank's value cannot be kept: all ranks must hear of it, and nothing may count."""
    state: dict[str, Any] = {"model": {"w": torch.ones(3)}, f"odd{dist.get_rank()}": {1, 2} if dist.get_rank() else 1}
    try:
        dcp.save(state, storage_writer=CheckpointStorageWriter(folder, 5))
    except dcp.CheckpointException as error:
        return str(error)
    return "saved"


def load_plain(shapes: dict[str, tuple[int, ...]], place: str) -> Flat:
    """Into DTensors over four ranks, rows or columns in turn, of a checkpoint that training saved."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    state: dict[str, Any] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        zeros = torch.zeros(shape)
        dims = len(shape)
        ways = [Shard(number % dims), Shard((number + 1) % dims)]
        state[name] = distribute_tensor(zeros, mesh, ways)
    dcp.load(state, storage_reader=CheckpointStorageReader(place))
    return whole(state)


def save_asynchronously(kind: str, folder: str) -> tuple[bool, int]:
    """By rows, from DCP's own thread or process; then back by columns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = torch.arange(20.0).view(5, 4)
    state: dict[str, Any] = {"model": {"w": distribute_tensor(weight, mesh, [Shard(0)])}, "epoch": 4}
    writer = CheckpointStorageWriter(folder, 1)
    future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType[kind])
    getattr(future, "upload_completion", future).result()
    found: dict[str, Any] = {"model": {"w": distribute_tensor(torch.zeros(5, 4), mesh, [Shard(1)])}, "epoch": 0}
    dcp.load(found, storage_reader=CheckpointStorageReader(folder))
    return torch.equal(found["model"]["w"].full_tensor(), weight), found["epoch"]
