"""Every compressor under every way the state is spread: nothing is lost for good, and all ranks hold the same."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks.core.pieces import Piece
from closeranks.core.protocols import ErrorFeedbackTensor, Reducer
from closeranks.optim.norms import norm_squared
from closeranks.parallel.process_group import RankGroup
from closeranks.sync.collectives.flat_buffer import FlatBufferSpec
from closeranks.sync.collectives.reductions import (
    FlatReduction,
    HierarchicalReduction,
    ReductionFactory,
    plain_reductions,
)
from closeranks.sync.compress.build import CODECS, compressed_reductions
from closeranks.sync.compress.compressed_reduction import CompressionSchedule
from closeranks.sync.compress.error_feedback import FACTOR, OWED, RESIDUAL
from closeranks.sync.config import CompressConfig
from closeranks.testing import run_world
from tests.sync.compress.names import COMPRESSORS as NAMES
from tests.sync.strategies import (
    Pieces,
    Strategy,
    assembled,
    backward,
    build,
    groups,
    make,
    pieces,
    reference,
    traffic,
)

pytestmark = pytest.mark.world

STRATEGIES = [
    *(Strategy(0), Strategy(1), Strategy(2, "shards"), Strategy(3, "step"), Strategy(3, "shards")),
    Strategy(2, "shards", bucket_bytes=1 << 20),  # which leaves again before it has arrived
]
NUM_STEPS, NUM_MICRO, NUM_WARMUP = 4, 2, 1
ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)


def config(name: str, **more: object) -> CompressConfig:
    return CompressConfig.model_validate({"name": name, "ratio": 0.1, "rank": 1, **more})


def reductions_of(name: str, group: RankGroup, *, scatters: bool, plan: CompressionSchedule) -> ReductionFactory:
    return compressed_reductions(config(name), group, plan, scatters=scatters)


@dataclass(frozen=True)
class Course:
    """What one rank saw of some steps in which nothing was updated."""

    arrived: list[Pieces]
    """Gradients of each step."""
    residual: Pieces
    owed: Pieces
    norms: list[float]
    skipped_is_untouched: bool
    measured: list[int]
    """Steps in which something was measured."""
    losses: Tensor
    sent: list[list[tuple[str, int]]]


def numbers(step: int) -> list[int]:
    first = 100 * step + NUM_MICRO * dist.get_rank()
    return list(range(first, first + NUM_MICRO))


def all_numbers(step: int, size: int) -> list[int]:
    return [100 * step + number for number in range(NUM_MICRO * size)]


def remembered(reducer: Reducer, kind: str) -> Pieces:
    return [(one.piece, one.tensor.clone()) for one in reducer.error_feedback() if one.kind == kind]


def observe(strategy: Strategy, name: str, num_replicas: int) -> Course:
    module = build()
    scatters = strategy.zero > 0 and num_replicas == 1
    plan = CompressionSchedule(num_warmup=NUM_WARMUP, sample_every=2)
    shard, replica, mesh = groups(num_replicas)
    reducer = make(
        strategy,
        module,
        shard,
        replica,
        mesh,
        factory_of=lambda over: reductions_of(name, over, scatters=scatters, plan=plan),
    )
    arrived, norms, measured, sent, losses = [], [], [], [], torch.zeros(4, dtype=torch.float64)
    for step in range(NUM_STEPS):
        reducer.begin_step(step)
        with traffic() as counted:
            backward(reducer, module, numbers(step))
        sent.append(counted)
        arrived.append(pieces(reducer, "gradients"))
        norms.append(norm_squared(reducer.primary_gradients()).item())
        if found := reducer.compression_errors():
            measured.append(step)
            losses += sum(found)
        reducer.commit(ONE)
        reducer.release()
    kept = [one.tensor.clone() for one in reducer.error_feedback()]
    reducer.begin_step(NUM_STEPS + 1)
    backward_with_nan(reducer, module)
    reducer.commit(ZERO)
    reducer.release()
    again = [one.tensor for one in reducer.error_feedback()]
    untouched = all(map(torch.equal, kept, again)) and len(kept) == len(again) > 0
    rest, owed = remembered(reducer, RESIDUAL), remembered(reducer, OWED)
    return Course(arrived, rest, owed, norms, untouched, measured, losses, sent)


def backward_with_nan(reducer: Reducer, module: nn.Module) -> None:
    with torch.no_grad():
        module.scale.data.fill_(torch.nan)  # type: ignore[union-attr]
    backward(reducer, module, numbers(9))
    assert not math.isfinite(norm_squared(reducer.gradients()).item()), "what is not finite must be seen"


def observe_all(num_replicas: int) -> dict[tuple[str, str], Course]:
    return {(str(s), name): observe(s, name, num_replicas) for s in STRATEGIES for name in NAMES}


@cache
def worlds(size: int, replicas: int) -> list[dict[tuple[str, str], Course]]:
    return run_world(observe_all, size, replicas, timeout_s=240)


def courses(strategy: Strategy, name: str, size: int, replicas: int) -> list[Course]:
    return [rank[str(strategy), name] for rank in worlds(size, replicas)]


each = [
    pytest.mark.parametrize(
        ("size", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)], ids=["2", "2x2"]
    ),
    pytest.mark.parametrize("strategy", STRATEGIES, ids=str),
    pytest.mark.parametrize("name", NAMES),
]


def every_case(test):  # type: ignore[no-untyped-def]
    for mark in each:
        test = mark(test)
    return test


def whole(strategy: Strategy, parts: Iterable[tuple[Piece, Tensor]], size: int, replicas: int) -> dict[str, Tensor]:
    parts = list(parts)
    uncut = [part for part in parts if strategy.zero == 0 or (strategy.zero == 3 and part[0].shape == ())]
    cut = [part for part in parts if not any(part is one for one in uncut)]
    return {**assembled(cut, replicas), **assembled(uncut, size)}


def added_rows(parts: Iterable[tuple[Piece, Tensor]]) -> dict[str, Tensor]:
    """By parameter, the sum of all rows."""
    return {name.partition("/")[2]: rows.sum(0) for name, rows in assembled(parts, 1).items()}


@every_case
def test_what_arrived_and_what_is_owed_are_all_of_the_gradient(
    strategy: Strategy, name: str, size: int, replicas: int
) -> None:
    ranks = courses(strategy, name, size, replicas)
    arrived: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for step in range(NUM_STEPS):
        found = whole(strategy, (part for rank in ranks for part in rank.arrived[step]), size, replicas)
        expected = reference([all_numbers(step, size)]).gradients
        for parameter, gradient in found.items():
            arrived[parameter] = arrived.get(parameter, 0) + gradient
            exact[parameter] = exact.get(parameter, 0) + expected[parameter]
    residual = added_rows(part for rank in ranks for part in rank.residual)
    owed = added_rows(part for rank in ranks for part in rank.owed)
    differs = False
    for parameter, total in exact.items():
        given = arrived[parameter]
        settled = given + residual.get(parameter, 0) + owed.get(parameter, 0)
        torch.testing.assert_close(settled, total, rtol=1e-9, atol=1e-9, msg=lambda text, n=parameter: f"{n}: {text}")
        differs = differs or not torch.allclose(given, total, rtol=1e-9, atol=1e-9)
    assert differs, "a compressor that loses nothing would prove nothing"


@every_case
def test_warm_up_is_exact_and_the_norm_is_of_what_arrived(
    strategy: Strategy, name: str, size: int, replicas: int
) -> None:
    ranks = courses(strategy, name, size, replicas)
    for step in range(NUM_STEPS):
        found = whole(strategy, (part for rank in ranks for part in rank.arrived[step]), size, replicas)
        squares = sum(gradient.square().sum().item() for gradient in found.values())
        assert sum(rank.norms[step] for rank in ranks) == pytest.approx(squares, rel=1e-12), "gaps count nothing"
        if step < NUM_WARMUP:
            for parameter, expected in reference([all_numbers(step, size)]).gradients.items():
                torch.testing.assert_close(found[parameter], expected, rtol=1e-11, atol=1e-11)


@every_case
def test_a_skipped_step_is_not_remembered(strategy: Strategy, name: str, size: int, replicas: int) -> None:
    assert all(rank.skipped_is_untouched for rank in courses(strategy, name, size, replicas))


@every_case
def test_losses_are_measured_where_they_are_asked_for(strategy: Strategy, name: str, size: int, replicas: int) -> None:
    ranks = courses(strategy, name, size, replicas)
    assert {step for rank in ranks for step in rank.measured} == {2}
    error, exact, ours, product = sum(rank.losses for rank in ranks).tolist()  # type: ignore[union-attr]
    assert 0 < error < 4 * exact
    assert 0.3 < product / math.sqrt(exact * ours) <= 1 + 1e-12
    if name in ("bf16", "fp16"):
        assert error < 1e-4 * exact


def large(name: str, num_steps: int) -> tuple[float, float, float]:
    """Norms after many steps of gradients of size one: of what this rank owes, of the bound, and of the first step."""
    group = RankGroup(dist.get_rank(), dist.get_world_size())
    numel = 8192
    spec = FlatBufferSpec((), numel, torch.float64, torch.device("cpu"))
    spec.__dict__["padding_indices"] = None  # nobody's, but not to be cleared
    reduction = compressed_reductions(config(name, ratio=0.05), group, CompressionSchedule())(spec)
    generator = torch.Generator().manual_seed(group.rank)
    biggest = 0.0
    scheme = reduction._scheme  # type: ignore[attr-defined]
    for step in range(num_steps):
        gradient = torch.randn(numel, dtype=torch.float64, generator=generator)
        gradient /= gradient.norm()
        reduction.begin_step(step)
        for work in reduction.all_reduce(gradient):
            work.wait()
        reduction.commit(ONE)
        biggest = max(biggest, scheme._residual.committed.norm().item())
    share = numel // group.size
    delta = CODECS[name](config(name, ratio=0.05)).contraction(share)
    return biggest, 2 * math.sqrt(1 - delta) / delta, scheme._owed.committed.norm().item()


@pytest.mark.parametrize("name", list(CODECS))
def test_what_is_owed_stays_within_the_bound(name: str) -> None:
    for biggest, bound, _ in run_world(large, 2, name, 60):
        assert 0 < biggest <= bound
        if name == "topk":
            assert biggest > 1.0, "it does owe more than one step"


def two_levels(names: list[str]) -> dict[str, Pieces]:
    """Two hosts of two ranks each."""
    rank = dist.get_rank()
    insides = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    acrosses = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    inside = RankGroup(rank % 2, 2, insides[rank // 2])
    across = RankGroup(rank // 2, 2, acrosses[rank % 2])
    found = {}
    for name in names:
        module = build()
        outer = (
            plain_reductions(across)
            if name == "none"
            else compressed_reductions(config(name), across, CompressionSchedule())
        )

        def make_reduction(spec: FlatBufferSpec, outer: ReductionFactory = outer) -> FlatReduction:
            return HierarchicalReduction(spec, inside, outer)

        shard, replica, mesh = groups(1)
        reducer = make(
            Strategy(0),
            module,
            shard,
            replica,
            mesh,
            factory_of=lambda over, make_reduction=make_reduction: make_reduction,
        )
        reducer.begin_step(0)
        backward(reducer, module, numbers(0))
        found[name] = pieces(reducer, "gradients")
        reducer.commit(ONE)
        found[f"{name} rest"] = remembered(reducer, RESIDUAL) + remembered(reducer, OWED)
    return found


def test_sums_of_two_levels_are_the_sum() -> None:
    names = ["none", "int8", "topk", "onebit"]
    ranks = run_world(two_levels, 4, names)
    expected = reference([all_numbers(0, 4)]).gradients
    for name in names:
        found = assembled([part for rank in ranks for part in rank[name]], 4)
        rest = [part for rank in ranks for part in rank[f"{name} rest"]]
        residual = added_rows(part for part in rest if part[0].name.startswith(RESIDUAL))
        owed = added_rows(part for part in rest if part[0].name.startswith(OWED))
        for parameter, gradient in found.items():
            settled = gradient + residual.get(parameter, 0) + owed.get(parameter, 0)
            torch.testing.assert_close(settled, expected[parameter], rtol=1e-9, atol=1e-9)
        assert bool(rest) == (name != "none")


@pytest.mark.parametrize(("name", "least"), [("bf16", 1.9), ("int8", 3.8), ("onebit", 20), ("powersgd", 4)])
def test_few_bytes_travel(name: str, least: float) -> None:
    sent = run_world(sent_bytes, 2, name)[0]
    plain = run_world(sent_bytes, 2, "none")[0]
    assert plain >= least * sent


def sent_bytes(name: str) -> int:
    group = RankGroup(dist.get_rank(), dist.get_world_size())
    flat = torch.randn(1 << 16)
    from closeranks.sync.collectives.flat_buffer import ParameterSpan

    piece = Piece.whole("w", (256, 256))
    spec = FlatBufferSpec((ParameterSpan(piece, 0, 0, 1 << 16),), 1 << 16, torch.float32, flat.device)
    reduction = (
        plain_reductions(group)(spec)
        if name == "none"
        else compressed_reductions(config(name, rank=4), group, CompressionSchedule())(spec)
    )
    with traffic() as counted:
        for work in reduction.all_reduce(flat):
            work.wait()
    # a ring's all-reduce moves its tensor twice, what is exchanged or gathered moves once
    return sum(num_bytes * (2 if kind.startswith("allreduce") else 1) for kind, num_bytes in counted)


def test_remembered_tensors_are_views_of_what_counts() -> None:
    assert run_world(views, 2) == [True, True]


def views() -> bool:
    group = RankGroup(dist.get_rank(), dist.get_world_size())
    from closeranks.sync.collectives.flat_buffer import ParameterSpan

    spans = (ParameterSpan(Piece.whole("a", (3, 2)), 0, 0, 6), ParameterSpan(Piece.whole("b", (5,)), 6, 0, 5))
    reduction = compressed_reductions(config("int8"), group, CompressionSchedule())(
        FlatBufferSpec(spans, 12, torch.float64, torch.device("cpu"))
    )
    before: list[ErrorFeedbackTensor] = list(reduction.error_feedback())
    for work in reduction.all_reduce(torch.arange(12, dtype=torch.float64) / 7):
        work.wait()
    reduction.commit(ONE)
    return any(one.tensor.any().item() for one in before) and all(
        one.tensor.data_ptr() == other.tensor.data_ptr()
        for one, other in zip(before, reduction.error_feedback(), strict=True)
    )


def after_zeros() -> list[Tensor]:
    """What arrives of a matrix whose first gradient is zero everywhere, step by step."""
    from closeranks.sync.collectives.flat_buffer import ParameterSpan

    group = RankGroup(dist.get_rank(), dist.get_world_size())
    spec = FlatBufferSpec((ParameterSpan(Piece.whole("w", (8, 8)), 0, 0, 64),), 64, torch.float32, torch.device("cpu"))
    reduction = compressed_reductions(config("powersgd"), group, CompressionSchedule())(spec)
    arrived = []
    for step in range(3):
        flat = torch.full((64,), float(step > 0))
        reduction.begin_step(step)
        for work in reduction.all_reduce(flat):
            work.wait()
        reduction.commit(ONE)
        arrived.append(flat)
    (factor,) = (one.tensor for one in reduction.error_feedback() if one.kind == FACTOR)
    return [*arrived, factor.clone()]


def test_a_matrix_of_zeros_is_not_the_end_of_it() -> None:
    for first, second, third, factor in run_world(after_zeros, 2):
        assert not first.any()
        torch.testing.assert_close(second, torch.full((64,), 2.0))
        torch.testing.assert_close(third, torch.full((64,), 2.0))
        assert factor.any()


@pytest.mark.parametrize("device_columns", [False, True])
def test_a_factor_of_zeros_is_never_kept(device_columns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator the columns of a matrix of zeros are zeros; a factorisation's are not."""
    from closeranks.sync.collectives.flat_buffer import ParameterSpan
    from closeranks.sync.compress import powersgd

    if device_columns:
        monkeypatch.setattr(powersgd, "orthogonalize", powersgd.gram_schmidt)
    spec = FlatBufferSpec((ParameterSpan(Piece.whole("w", (8, 8)), 0, 0, 64),), 64, torch.float32, torch.device("cpu"))
    batch = powersgd._Batch(powersgd.find_matrices(spec, 1), 1, spec, torch.float32)
    before, flat = batch.q.read().clone(), torch.zeros(64)
    p = batch.project(flat, torch.float32)
    batch.restore(batch.take_back(p), flat, None, 1)
    batch.q.commit(ONE)
    assert torch.equal(batch.q.committed, before)
