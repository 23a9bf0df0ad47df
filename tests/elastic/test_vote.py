"""The verdict: one factor, one flag, the same on every rank."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.requests import DRAIN, REGROUP, REQUESTS, SAVE
from closeranks.elastic.vote import Ballot, StepOutcome, Vote, settle, settle_on_device
from closeranks.parallel.process_group import RankGroup
from closeranks.testing import run_world


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def cast(loss: float, weight: float, norm_squared: float, *, clip: float = 1.0, scale: float = 1.0) -> StepOutcome:
    vote = Vote(RankGroup(0, 1), ("hits",), clip=clip)
    ballot = Ballot(number(loss), number(weight), number(norm_squared), {"hits": number(3.0)})
    return vote.cast(ballot, torch.tensor(scale)).read()


def test_loss_and_metrics_are_divided_by_the_weight() -> None:
    outcome = cast(12.0, 4.0, 0.0)
    assert outcome.loss == 3.0
    assert outcome.metrics == {"hits": 0.75}


def both(weight: float, norm_squared: float, nonfinite: float, scale: float, clip: float) -> tuple[float, ...]:
    """The verdict, once for the host and once for the device: they must not differ."""
    on_host = settle(weight, norm_squared, nonfinite, scale, clip)
    sums = torch.tensor([0.0, weight, norm_squared, nonfinite, 0.0, 0.0], dtype=torch.float64)
    on_device = settle_on_device(sums, torch.tensor(scale), clip).tolist()
    assert on_device == pytest.approx(on_host, rel=1e-12, nan_ok=True)
    return on_host


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(0.1, 10), st.sampled_from([1.0, 1024.0]))
def test_the_factor_divides_by_weight_and_scale_and_clips(
    norm: float, weight: float, clip: float, scale: float
) -> None:
    raw = norm * weight * scale
    taken, factor, got, _ = both(weight, raw * raw, 0.0, scale, clip)
    assert taken == 1
    assert got == pytest.approx(norm, rel=1e-9)
    assert raw * factor == pytest.approx(min(norm, clip), rel=1e-4)
    assert both(weight, raw * raw, 0.0, scale, 0.0)[1] == pytest.approx(1 / (weight * scale), rel=1e-12)


@pytest.mark.parametrize("sums", [(4.0, 1.0, 1.0), (4.0, math.inf, 0.0), (4.0, math.nan, 0.0)])
def test_a_skipped_step_has_factor_one(sums: tuple[float, float, float]) -> None:
    assert both(*sums, 1.0, 1.0)[:2] == (0.0, 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_skips_the_step(bad: float) -> None:
    assert not cast(bad, 4.0, 1.0).taken
    assert not cast(1.0, 4.0, bad).taken
    assert cast(1.0, 4.0, 1.0).taken


def test_a_step_without_samples_is_not_taken() -> None:
    assert not cast(0.0, 0.0, 0.0).taken


def one_rank_is_bad() -> tuple[StepOutcome, float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    vote = Vote(RankGroup(rank, size), (), clip=0.0)
    loss = math.nan if rank == 1 else 2.0
    verdict = vote.cast(
        Ballot(number(loss), number(1.0), number(9.0), {}, frozenset({DRAIN} if rank == 2 else ())), torch.tensor(1.0)
    )
    return verdict.read(), verdict.factor.item()


@pytest.mark.world
def test_all_ranks_skip_together_and_hear_of_the_drain() -> None:
    for outcome, factor in run_world(one_rank_is_bad, 3):
        assert not outcome.taken
        assert outcome.requests == {DRAIN}
        assert factor == 1.0


def each_rank_asks_for_something() -> StepOutcome:
    rank, size = dist.get_rank(), dist.get_world_size()
    vote = Vote(RankGroup(rank, size), ("hits",), clip=0.0)
    metrics = {"hits": number(5.0)}
    asked = (frozenset(), frozenset({REGROUP}), frozenset({SAVE, REGROUP}))[rank]
    return vote.cast(Ballot(number(2.0), number(1.0), number(9.0), metrics, asked), torch.tensor(1.0)).read()


@pytest.mark.world
def test_all_ranks_hear_that_one_wants_to_regroup() -> None:
    for outcome in run_world(each_rank_asks_for_something, 3):
        assert outcome.requests == {REGROUP, SAVE}
        assert outcome.num_bad == 0
        assert outcome.taken, "a step that is regrouped after is a step like any other"
        assert outcome.metrics == {"hits": 5.0}


@pytest.mark.parametrize("kind", ["drain", "save", "stop", "regroup"])
def test_each_request_has_a_place_of_its_own(kind: str) -> None:
    """None is read as another or as a sample that was left out, and the metrics come after them."""
    vote = Vote(RankGroup(0, 1), ("hits",), clip=0.0)
    ballot = Ballot(
        number(2.0), number(1.0), number(9.0), {"hits": number(5.0)}, frozenset({REQUESTS[kind]}), num_bad=7
    )
    outcome = vote.cast(ballot, torch.tensor(1.0)).read()
    assert (outcome.requests, outcome.num_bad) == ({REQUESTS[kind]}, 7)
    assert outcome.metrics == {"hits": 5.0}


def all_ranks_are_good() -> StepOutcome:
    rank, size = dist.get_rank(), dist.get_world_size()
    vote = Vote(RankGroup(rank, size), (), clip=0.0)
    return vote.cast(Ballot(number(rank + 1.0), number(2.0), number(12.0), {}), torch.tensor(1.0)).read()


@pytest.mark.world
def test_adds_what_each_rank_speaks_for() -> None:
    for outcome in run_world(all_ranks_are_good, 3):
        assert outcome.loss == 1.0
        assert outcome.grad_norm == 1.0
        assert outcome.taken
