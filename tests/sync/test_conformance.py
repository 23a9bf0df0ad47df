"""One suite for every way gradients travel: what one process would do, whoever holds what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks.core.pieces import Piece
from closeranks.core.protocols import SEVERAL_STAGES, LocalParameter
from closeranks.optim.norms import norm_squared
from closeranks.optim.optimizer import Optimizer, freeze
from closeranks.parallel.process_group import RankGroup
from closeranks.sync.reducers.all_reduce import AllReduceReducer
from closeranks.sync.reducers.local_parameters import local_parameters
from closeranks.sync.reducers.sharded import ALIGN_BYTES, NUM_IN_FLIGHT, ShardedReducer
from closeranks.testing import run_world
from tests.sync.strategies import (
    CONFIG,
    SERVERS,
    STRATEGIES,
    ZERO,
    Pieces,
    Strategy,
    assembled,
    backward,
    build,
    groups,
    held_bytes,
    make,
    pieces,
    reference,
    traffic,
    update,
)

pytestmark = pytest.mark.world

NUM_STEPS, NUM_MICRO = 2, 3
WORLDS = [(2, 1), (4, 1), (4, 2)]  # size, replicas
CONFORMING = [
    *((strategy, *world) for world in WORLDS for strategy in STRATEGIES),
    *((strategy, *world) for world in WORLDS[:2] for strategy in SERVERS),
]
each_conforming = pytest.mark.parametrize(
    ("strategy", "size", "replicas"),
    CONFORMING,
    ids=[f"{strategy}-{size if replicas == 1 else '2x2'}" for strategy, size, replicas in CONFORMING],
)
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
each_world = pytest.mark.parametrize(("size", "replicas"), WORLDS, ids=["2", "4", "2x2"])


@dataclass(frozen=True)
class Told:
    """What one rank saw of one strategy."""

    gradients: Pieces
    """Of the first step."""
    weights: Pieces
    """After the last."""
    parameters: dict[str, Tensor]
    """What the module computes with, after the last; empty where it holds shards."""
    norm_squared: float
    skipped_is_untouched: bool
    is_released: bool
    needs_equal_counts: bool
    gradient_bytes: int
    memory_bytes: int
    sent: list[list[tuple[str, int]]]
    """Collectives of each step's forwards and backwards."""


def assignment(step: int, rank: int, *, equal: bool) -> list[int]:
    """Micro-batches of a rank. Where counts may differ, the first rank has two more than its share, the last none."""
    size, first = dist.get_world_size() if dist.is_initialized() else 0, 100 * step
    if equal:
        return [first + rank * NUM_MICRO + number for number in range(NUM_MICRO)]
    counts = [NUM_MICRO] * size
    counts[0], counts[-1] = 2 * NUM_MICRO, 0
    return [first + sum(counts[:rank]) + number for number in range(counts[rank])]


def all_batches(size: int) -> list[list[int]]:
    return [[100 * step + number for number in range(size * NUM_MICRO)] for step in range(NUM_STEPS)]


def observe(strategy: Strategy, num_replicas: int) -> Told:
    module = build()
    chosen = freeze(module, CONFIG)
    reducer = make(strategy, module, *groups(num_replicas))
    optimizer = Optimizer(reducer.parameter_shards(), chosen, CONFIG, num_steps=10)
    sent = []
    for step in range(NUM_STEPS):
        reducer.begin_step(step)
        with traffic() as counted:
            backward(reducer, module, assignment(step, dist.get_rank(), equal=reducer.needs_equal_counts))
        sent.append(counted)
        if step == 0:
            gradients, norm = pieces(reducer, "gradients"), norm_squared(reducer.primary_gradients()).item()
            gradient_bytes = held_bytes(reducer.gradients())
        update(reducer, optimizer, step)
    weights = pieces(reducer, "weights")
    reducer.begin_step(9)
    backward(reducer, module, assignment(9, dist.get_rank(), equal=True))
    for gradient in reducer.gradients():
        gradient.fill_(torch.nan)
    remembered = [tensor.clone() for _, _, tensor in optimizer.state_tensors()]
    update(reducer, optimizer, 9, ok=ZERO)
    again = [
        *(tensor for _, tensor in pieces(reducer, "weights")),
        *(tensor for _, _, tensor in optimizer.state_tensors()),
    ]
    return Told(
        gradients=gradients,
        weights=weights,
        parameters={} if strategy.zero == 3 else {name: p.detach().clone() for name, p in module.named_parameters()},
        norm_squared=norm,
        skipped_is_untouched=all(map(torch.equal, again, [*(tensor for _, tensor in weights), *remembered])),
        is_released=all(p.grad is None for p in module.parameters()) and not pieces(reducer, "gradients"),
        needs_equal_counts=reducer.needs_equal_counts,
        gradient_bytes=gradient_bytes,
        memory_bytes=held_bytes(tensor for _, _, tensor in optimizer.state_tensors() if tensor.ndim),
        sent=sent,
    )


def observe_all(num_replicas: int) -> dict[str, Told]:
    observed = [*STRATEGIES, *(SERVERS if num_replicas == 1 else ())]
    return {str(strategy): observe(strategy, num_replicas) for strategy in observed}


@cache
def worlds(size: int, replicas: int) -> list[dict[str, Told]]:
    return run_world(observe_all, size, replicas)


def told(strategy: Strategy, size: int, replicas: int) -> list[Told]:
    return [rank[str(strategy)] for rank in worlds(size, replicas)]


def whole(strategy: Strategy, ranks: list[Told], replicas: int, of: str) -> dict[str, Tensor]:
    """All that ranks hold, put together; a parameter without dims is not cut by FSDP2."""
    parts: Pieces = [part for rank in ranks for part in getattr(rank, of)]
    uncut = [part for part in parts if strategy.zero in (0, 3) and (strategy.zero == 0 or part[0].shape == ())]
    cut = [part for part in parts if not any(part is one for one in uncut)]
    return {**assembled(cut, replicas), **assembled(uncut, len(ranks))}


@each_conforming
def test_gradients_are_the_sum_over_all_micro_batches(strategy: Strategy, size: int, replicas: int) -> None:
    expected = reference(all_batches(size)).gradients
    found = whole(strategy, told(strategy, size, replicas), replicas, "gradients")
    assert set(found) == set(expected)
    for name, gradient in found.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-11, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )


@each_conforming
def test_weights_after_updates_are_those_of_one_process(strategy: Strategy, size: int, replicas: int) -> None:
    expected = reference(all_batches(size)).weights
    ranks = told(strategy, size, replicas)
    found = whole(strategy, ranks, replicas, "weights")
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)
    for rank in ranks:
        for name, parameter in rank.parameters.items():
            assert torch.equal(parameter, found.get(name, dict(build().named_parameters())[name])), "spread, or frozen"


@each_conforming
def test_each_value_of_the_norm_has_one_speaker(strategy: Strategy, size: int, replicas: int) -> None:
    expected = sum(gradient.square().sum().item() for gradient in reference(all_batches(size)).gradients.values())
    assert sum(rank.norm_squared for rank in told(strategy, size, replicas)) == pytest.approx(expected, rel=1e-12)


@each_conforming
def test_a_skipped_step_leaves_no_trace(strategy: Strategy, size: int, replicas: int) -> None:
    for rank in told(strategy, size, replicas):
        assert rank.skipped_is_untouched
        assert rank.is_released


@each_world
@each_strategy
def test_ranks_hold_their_share_and_some_padding(strategy: Strategy, size: int, replicas: int) -> None:
    trained = {p for p in build().parameters() if p.requires_grad}
    model_bytes, shards = held_bytes(trained), size // replicas if strategy.zero else 1
    ranks = told(strategy, size, replicas)
    memory = [rank.memory_bytes for rank in ranks]
    # FSDP2 cuts rows, not elements: the first rank may have a row more of each parameter; gaps align parameters.
    slack = sum(p[0].numel() * 8 for p in trained if p.ndim) + 8 * (shards - 1) if strategy.zero == 3 else 0
    gaps = ALIGN_BYTES * (len(trained) + shards * 20) if strategy.zero in (1, 2) else 0
    assert max(memory) <= 2 * (model_bytes / shards + slack + gaps)
    if strategy.zero in (1, 2):
        assert sum(memory) == 2 * model_bytes * replicas, "padding has no memory"
    assert all(
        model_bytes / shards - slack <= rank.gradient_bytes <= model_bytes / shards + slack + gaps for rank in ranks[:1]
    )


REDUCTIONS = ("allreduce_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")


def reductions(sent: list[tuple[str, int]]) -> list[int]:
    return [num_bytes for name, num_bytes in sent if name in REDUCTIONS]


@pytest.mark.parametrize(("size", "replicas"), [(2, 1)])
@each_strategy
def test_accumulation_reduces_once_unless_shards_are_held(strategy: Strategy, size: int, replicas: int) -> None:
    trained = {p for p in build().parameters() if p.requires_grad}
    model_bytes = held_bytes(trained)
    first, second = (reductions(sent) for sent in told(strategy, size, replicas)[0].sent)
    assert len(first) == len(second)
    times = NUM_MICRO if strategy.hold == "shards" else 1
    padding = ALIGN_BYTES * 2 * len(trained)
    # FSDP2 leaves out what no sample used, and pads rows
    unused = held_bytes(build().never.parameters()) if strategy.zero == 3 else 0
    rows = sum(p[0].numel() * 8 for p in trained if p.ndim) if strategy.zero == 3 else 0
    assert times * (model_bytes - unused) <= sum(first) <= times * (model_bytes + padding + rows)


@pytest.mark.parametrize(("size", "replicas"), [(4, 2)])
def test_replicas_are_summed_once_per_step(size: int, replicas: int) -> None:
    for strategy in (Strategy(2, "shards"), Strategy(3, "shards")):
        sent = told(strategy, size, replicas)[0].sent[0]
        scattered = [name for name, _ in sent if "reduce_scatter" in name]
        summed = [name for name, _ in sent if name == "allreduce_"]
        extra = 2 if strategy.zero == 3 else 0  # the scalar, over both groups
        assert len(scattered) == NUM_MICRO * (len(summed) - extra), str(strategy)


@pytest.mark.parametrize(("size", "replicas"), [(2, 1)])
def test_weights_are_gathered_once_per_step_when_held(size: int, replicas: int) -> None:
    """Two units and the root; held as shards, a unit is gathered in forward and, but for the last, in backward."""
    for hold, expected in (("step", 3), ("shards", NUM_MICRO * 4)):
        for overlap in (True, False):
            sent = told(Strategy(3, hold, overlap), size, replicas)[0].sent[1]
            assert len([name for name, _ in sent if "allgather" in name]) == expected, (hold, overlap)


@each_strategy
def test_who_needs_equal_counts(strategy: Strategy) -> None:
    assert told(strategy, 2, 1)[0].needs_equal_counts == (
        strategy.zero == 3 or (strategy.zero, strategy.hold) == (2, "shards")
    )


def twice(strategies: list[Strategy]) -> list[bool]:
    return [_same(observe(strategy, 1).weights, observe(strategy, 1).weights) for strategy in strategies]


def _same(one: Pieces, other: Pieces) -> bool:
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True))


def test_a_run_repeats_bit_for_bit_on_three_ranks() -> None:
    assert run_world(twice, 3, [*STRATEGIES[:6], *SERVERS]) == [[True] * 9] * 3


PARTIAL = ("narrow.1.weight", "embed.weight", "out.bias")


def partial_sums(strategies: list[Strategy]) -> list[dict[str, Pieces]]:
    """Ranks 0, 1 and 2, 3 are data groups of two halves of a model; some gradients are sums over 0, 2 and 1, 3."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "shard"))
    data = mesh.get_group("shard")
    shard = RankGroup(dist.get_rank(data), 2, data)
    found = []
    for strategy in strategies:
        module = build()
        over = dict.fromkeys(PARTIAL, (mesh.get_group("tensor"),))
        reducer = make(strategy, module, shard, RankGroup(0, 1), mesh["shard"], over)
        backward(reducer, module, assignment(0, dist.get_rank(), equal=True))
        found.append(pieces(reducer, "gradients"))
    return found


def test_some_gradients_are_summed_over_further_groups() -> None:
    strategies = STRATEGIES[:6]
    ranks = run_world(partial_sums, 4, strategies)
    numbers = list(range(4 * NUM_MICRO))
    halves = [reference([numbers[: 2 * NUM_MICRO]]).gradients, reference([numbers[2 * NUM_MICRO :]]).gradients]
    for index, strategy in enumerate(strategies):
        for half, own in enumerate((ranks[:2], ranks[2:])):
            parts = [part for rank in own for part in rank[index] if part[0].shape != ()]
            found = assembled(parts, 2 if strategy.zero == 0 else 1)
            for name, gradient in found.items():
                expected = halves[0][name] + halves[1][name] if name in PARTIAL else halves[half][name]
                torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-11, msg=f"{strategy} {name}")


def two_stages(kind: str) -> dict[str, Any]:
    """Two stages of one rank: a shared matrix, and one of its own each; three micro-batches in an interleaved order."""
    group = RankGroup(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    shared, one, other = (nn.Parameter(torch.randn(5, 5, dtype=torch.float64)) for _ in range(3))
    stages = {"shared": SEVERAL_STAGES, "one": 0, "other": 1}
    parameters = {"shared": shared, "one": one, "other": other}
    held = [LocalParameter(p, Piece.whole(name, (5, 5)), stage=stages[name]) for name, p in parameters.items()]
    caps = {"bucket_bytes": 1 << 10, "first_bucket_bytes": 1 << 10}
    zero = int(kind[0])
    if zero == 0:
        reducer: Any = AllReduceReducer(held, group, **caps)
    else:
        reducer = ShardedReducer(held, group, RankGroup(0, 1), zero=zero, hold=kind[1:], **caps)
    for stage, micro in ((1, 0), (1, 1), (0, 0), (1, 2), (0, 1), (0, 2)):
        x = torch.full((2, 5), 1.0 + micro + 10 * group.rank, dtype=torch.float64)
        reducer.begin_backward(stage, is_last=micro == 2)
        ((x @ shared) * (x @ (one if stage == 0 else other))).sum().backward()
        reducer.end_backward(stage)
    reducer.finish()
    return {"gradients": pieces(reducer, "gradients")}


@pytest.mark.parametrize("kind", ["0", "1step", "2shards"])
def test_stages_of_one_rank_may_share_a_parameter(kind: str) -> None:
    ranks = run_world(two_stages, 2, kind)
    torch.manual_seed(0)
    shared, one, other = (torch.randn(5, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for rank in range(2):
        for micro in range(3):
            x = torch.full((2, 5), 1.0 + micro + 10 * rank, dtype=torch.float64)
            ((x @ shared) * (x @ one)).sum().backward()
            ((x @ shared) * (x @ other)).sum().backward()
    found = assembled([part for rank in ranks for part in rank["gradients"]], 2 if kind == "0" else 1)
    for name, parameter in (("shared", shared), ("one", one), ("other", other)):
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-12)


def held_between_micro_batches() -> list[tuple[int, int]]:
    """After each backward: bytes of gradients at the parameters, and of all buckets that have not arrived."""
    group = RankGroup(dist.get_rank(), dist.get_world_size())
    module = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    reducer = ShardedReducer(
        local_parameters(module),
        group,
        RankGroup(0, 1),
        zero=2,
        hold="shards",
        bucket_bytes=1024,
        first_bucket_bytes=1024,
    )
    seen = []
    for number in range(3):
        reducer.begin_backward(is_last=number == 2)
        module(torch.randn(2, 16)).sum().backward()
        reducer.end_backward()
        waiting = [bucket.outgoing for bucket in reducer._buckets if bucket.outgoing is not None]
        left = [p.grad for p in module.parameters() if p.grad is not None]
        seen.append((held_bytes(left), held_bytes(waiting) + 1024 * len(reducer._in_flight)))
    reducer.finish()
    return seen


def test_zero_2_holds_shards_and_what_is_under_way() -> None:
    for rank in run_world(held_between_micro_batches, 2):
        assert all(left == 0 and travelling <= NUM_IN_FLIGHT * 1024 for left, travelling in rank), rank
