"""All ways gradients travel behind one function, a model with every kind of parameter, and what one process does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from closeranks.core.pieces import Piece
from closeranks.core.protocols import Reducer
from closeranks.optim.config import OptimConfig, ScheduleConfig
from closeranks.optim.optimizer import Optimizer, freeze, whole_parameters
from closeranks.parallel.fully_shard import shard_fully
from closeranks.parallel.precision import Precision
from closeranks.parallel.process_group import RankGroup
from closeranks.sync.collectives.reductions import ReductionFactory
from closeranks.sync.reducers.all_reduce import AllReduceReducer
from closeranks.sync.reducers.fully_sharded import FullyShardedReducer
from closeranks.sync.reducers.local_parameters import local_parameters
from closeranks.sync.reducers.sharded import ShardedReducer
from closeranks.sync.server.backup import BackupBallots, BackupReducer
from closeranks.sync.server.decisions import Expected
from closeranks.sync.server.reducer import ServerReducer
from closeranks.sync.server.roles import Roles
from closeranks.sync.server.stale import StaleReducer

CONFIG = OptimConfig(lr=0.03, weight_decay=0.2, schedule=ScheduleConfig(name="constant", warmup=0))
ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)


@dataclass(frozen=True)
class Strategy:
    zero: int
    hold: str = "step"
    overlap: bool = True
    bucket_bytes: int = 600
    server: str = ""
    """The last rank is a parameter server; how: ``sync``, ``stale`` or ``backup``."""

    def __str__(self) -> str:
        if self.server:
            return f"server-{self.server}"
        size = "" if self.bucket_bytes < 1 << 20 else "-one_bucket"
        return f"zero{self.zero}-{self.hold}{'' if self.overlap else '-apart'}{size}"


STRATEGIES = [
    Strategy(0),
    Strategy(1),
    Strategy(2, "step"),
    Strategy(2, "shards"),
    Strategy(3, "step"),
    Strategy(3, "shards"),
]
STRATEGIES = [*STRATEGIES, *(replace(strategy, overlap=False) for strategy in STRATEGIES)]
SERVERS = [Strategy(1, server=how) for how in ("sync", "stale", "backup")]


class Odd(nn.Module):
    """Sizes that nothing divides, a tied pair, a frozen matrix, parameters few samples or none use, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.wide = nn.Sequential(nn.Linear(7, 13), nn.Tanh())
        self.frozen = nn.Linear(13, 13)
        self.narrow = nn.Sequential(nn.Linear(13, 7, bias=False), nn.LayerNorm(7))
        self.sometimes = nn.Linear(7, 7)
        self.never = nn.Linear(3, 1)
        self.out = nn.Linear(7, 3)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor, uses_all: bool) -> Tensor:
        x = self.narrow(self.frozen(self.wide(self.embed(tokens))))
        if uses_all:
            x = x + self.sometimes(x)
        return (self.out(x) * self.scale).square().sum() + self.head(x).sin().sum()


BLOCKS = ("wide", "narrow")


def build() -> Odd:
    torch.manual_seed(5)
    return Odd().double()


def loss(module: nn.Module, number: int) -> Tensor:
    """Of micro-batch ``number``; the odd ones use all parameters but ``never``."""
    tokens = torch.randint(13, (4, 3), generator=torch.Generator().manual_seed(number))
    return module(tokens, number % 2 == 1)


def groups(num_replicas: int) -> tuple[RankGroup, RankGroup, Any]:
    """Shard group, replica group and mesh of this world."""
    size = dist.get_world_size() // num_replicas
    mesh = init_device_mesh("cpu", (num_replicas, size), mesh_dim_names=("replica", "shard"))
    own = [mesh.get_group(axis) for axis in ("shard", "replica")]
    shard, replica = (RankGroup(dist.get_rank(group), dist.get_world_size(group), group) for group in own)
    return shard, replica, mesh if num_replicas > 1 else mesh["shard"]


def make(
    strategy: Strategy,
    module: nn.Module,
    shard: RankGroup,
    replica: RankGroup,
    mesh: Any,
    partial: dict[str, Any] | None = None,
    factory_of: Callable[[RankGroup], ReductionFactory] | None = None,
) -> Reducer:
    """``partial``: further groups of some parameters, by name; ``factory_of``: how buckets are summed, of the group
    that is asked for it."""
    caps: dict[str, Any] = {"bucket_bytes": strategy.bucket_bytes, "first_bucket_bytes": strategy.bucket_bytes // 3}
    if strategy.server:
        return make_server(strategy, module)
    if strategy.zero == 3:
        precision = Precision("float64")
        mesh = mesh["shard"] if factory_of is not None and replica.size > 1 else mesh
        shard_fully(module, BLOCKS, mesh, precision=precision, hold=strategy.hold, prefetch=1, overlap=strategy.overlap)
    held = [replace(one, partial_over=(partial or {}).get(one.piece.name, ())) for one in local_parameters(module)]
    if strategy.zero == 3:
        over = replica if replica.size > 1 else shard
        made = factory_of(over) if factory_of is not None else None
        return FullyShardedReducer(held, [module], shard, replica, hold=strategy.hold, reduction_factory=made)
    if strategy.zero == 0:
        size = shard.size * replica.size
        data = RankGroup(
            replica.rank * shard.size + shard.rank, size, shard.process_group if replica.size == 1 else None
        )
        made = factory_of(data) if factory_of is not None else None
        return AllReduceReducer(held, data, overlap=strategy.overlap, reduction_factory=made, **caps)
    caps["reduction_factory"] = factory_of(replica if replica.size > 1 else shard) if factory_of is not None else None
    keys: dict[str, Any] = {"zero": strategy.zero, "hold": strategy.hold, "overlap": strategy.overlap}
    return ShardedReducer(held, shard, replica, **keys, **caps)


def make_server(strategy: Strategy, module: nn.Module) -> ServerReducer:
    """All ranks but the last are workers, and all synchronize after every step."""
    group, roles = RankGroup(dist.get_rank(), dist.get_world_size()), Roles(dist.get_world_size() - 1, 1)
    caps: dict[str, Any] = {"bucket_bytes": strategy.bucket_bytes, "first_bucket_bytes": strategy.bucket_bytes // 3}
    held, caps["last_step"] = local_parameters(module), lambda step: step
    if strategy.server == "sync":
        return ServerReducer(held, group, roles, **caps)
    if strategy.server == "stale":
        return StaleReducer(held, group, roles, **caps, bound=0)
    reducer = BackupReducer(held, group, roles, **caps)
    workers = tuple(range(roles.num_workers))
    reducer.expected = lambda step: Expected(workers, len(workers))
    reducer.ballots = BackupBallots(reducer, RankGroup(0, 1))
    return reducer


def backward(reducer: Reducer, module: nn.Module, numbers: Sequence[int]) -> None:
    for number in numbers:
        total = loss(module, number)
        reducer.begin_backward(is_last=number == numbers[-1])
        total.backward()
        reducer.end_backward()
    reducer.finish()
    if isinstance(reducer, BackupReducer):
        reducer.ballots.sum(torch.zeros(1))


def update(reducer: Reducer, optimizer: Optimizer, step: int, ok: Tensor = ONE) -> None:
    optimizer.step(step, reducer.gradients(), torch.tensor(0.1, dtype=torch.float64), ok)
    reducer.gather_parameters()
    reducer.release()


Pieces = list[tuple[Piece, Tensor]]


def pieces(reducer: Reducer, of: str) -> Pieces:
    """What this rank has of the weights or the gradients."""
    tensors = (
        (leaf.piece, leaf.tensor if of == "weights" else leaf.tensor.grad) for leaf in reducer.parameter_shards()
    )
    return [(piece, tensor.detach().clone()) for piece, tensor in tensors if tensor is not None]


def assembled(parts: Iterable[tuple[Piece, Tensor]], copies: int) -> dict[str, Tensor]:
    """Whole tensors from the pieces of all ranks, each element of which ``copies`` of them must have, all alike."""
    whole: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for piece, tensor in parts:
        target = whole.setdefault(piece.name, torch.zeros(piece.shape, dtype=tensor.dtype))
        count = counts.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.int64))
        box = tuple(slice(start, start + size) for start, size in zip(piece.start, piece.size, strict=True))
        index = torch.arange(target.numel()).view(piece.shape)[box].reshape(-1)
        index = index if piece.flat is None else index[piece.flat[0] : piece.flat[1]]
        assert tuple(tensor.shape) == piece.local_shape
        seen = count.view(-1)[index] > 0
        assert torch.equal(target.view(-1)[index][seen], tensor.reshape(-1)[seen]), "copies differ"
        target.view(-1)[index] = tensor.reshape(-1)
        count.view(-1)[index] += 1
    for name, count in counts.items():
        assert (count == copies).all(), f"{name} is covered {count.unique().tolist()} times, not {copies}"
    return whole


@dataclass(frozen=True)
class Reference:
    """One process that sees every micro-batch."""

    gradients: dict[str, Tensor]
    """Of the first step."""
    weights: dict[str, Tensor]
    """After the last."""


def reference(steps: Sequence[Sequence[int]]) -> Reference:
    module = build()
    optimizer = Optimizer(whole_parameters(module), freeze(module, CONFIG), CONFIG, num_steps=10)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    first: dict[str, Tensor] = {}
    for step, numbers in enumerate(steps):
        module.zero_grad()
        for number in numbers:
            loss(module, number).backward()
        for parameter in trained.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = {name: p.grad for name, p in trained.items() if p.grad is not None}
        first = first or {name: gradient.clone() for name, gradient in gradients.items()}
        optimizer.step(step, list(gradients.values()), torch.tensor(0.1, dtype=torch.float64), ONE)
    return Reference(first, {name: p.detach() for name, p in trained.items()})


class Traffic(TorchDispatchMode):
    """Counts collectives as they reach the backend, ours and FSDP2's alike."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            # the larger side: what is reduced, what is gathered
            sizes = [sum(t.numel() * t.element_size() for t in _tensors(arg)) for arg in args[:2]]
            self.sent.append((name, max(sizes)))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


@contextmanager
def traffic() -> Iterator[list[tuple[str, int]]]:
    with Traffic() as counted:
        yield counted.sent


def held_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
