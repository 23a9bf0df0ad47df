"""Votes of local SGD replicas: each decides for itself, and all hear of all when they meet."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.core.requests import DRAIN
from closeranks.elastic.local_sgd_vote import LocalSgdVote
from closeranks.elastic.vote import Ballot
from closeranks.facts.layout import Layout
from closeranks.parallel.mesh_groups import open_mesh_groups
from closeranks.parallel.process_group import RankGroup
from closeranks.testing import run_world

pytestmark = pytest.mark.world


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def two_rounds() -> list[dict[str, Any]]:
    """Four ranks in two replicas, a round of two steps and one of one. In the first step replica 1 overflows; in the
    second rank 3 wants to drain."""
    rank = dist.get_rank()
    groups = open_mesh_groups(RankGroup(rank, 4), Layout(data=4), torch.device("cpu"), 30.0, num_replica_groups=2)
    home = groups.replica_group
    assert (home.number, home.world.size, home.across_groups.size) == (rank // 2, 2, 2)
    vote = LocalSgdVote(
        home.world, groups.world, ("hits",), clip=0.0, num_replica_groups=2, contributes=home.world.rank == 0
    )
    told: list[dict[str, Any]] = []
    verdicts = []
    for step, is_sync_step in enumerate((False, True, True)):
        loss = math.inf if step == 0 and rank == 3 else float(rank + 1)
        sums = (number(loss), number(1.0 + rank), number(float(rank)))
        ballot = Ballot(*sums, {"hits": number(10.0 * rank)}, frozenset({DRAIN} if step == 1 and rank == 3 else ()))
        verdicts.append(vote.cast(ballot, torch.tensor(1.0), is_sync_step=is_sync_step))
        told.append({"closed": [verdict.is_closed for verdict in verdicts], "factor": verdicts[-1].factor.item()})
    for verdict, one in zip(verdicts, told, strict=True):
        one["outcome"] = verdict.read()
        one["own"] = verdict.taken.item()
    return told


def test_a_round_is_read_when_it_is_closed() -> None:
    ranks = run_world(two_rounds, 4)
    for rank, (first, second, third) in enumerate(ranks):
        assert [one["closed"] for one in (first, second, third)] == [[False], [True, True], [True, True, True]]
        # Replica 0 took the first step, by its own weight; replica 1 did not.
        assert first["own"] == (1.0 if rank < 2 else 0.0)
        assert first["factor"] == pytest.approx(1 / 3 if rank < 2 else 1.0)
        assert second["factor"] == pytest.approx(1 / 3 if rank < 2 else 1 / 7)
        assert not first["outcome"].taken, "a step is taken where all took it"
        assert (second["outcome"].taken, third["outcome"].taken) == (True, True)
        assert [one["outcome"].requests for one in (first, second, third)] == [set(), {DRAIN}, set()]
        assert second["outcome"].loss == pytest.approx(10.0 / 10.0)
        assert second["outcome"].metrics == {"hits": pytest.approx(60.0 / 10.0)}
        # each replica's own norm over its own weight, and the mean of both
        assert third["outcome"].grad_norm == pytest.approx((1 / 3 + math.sqrt(5) / 7) / 2)
        assert third["outcome"].loss_scale == 1.0
    outcomes = [[one["outcome"] for one in told[1:]] for told in ranks]
    assert all(outcome == outcomes[0] for outcome in outcomes), "the same bits on every rank"


def with_idle_replica() -> list[Any]:
    """Two replicas of one rank: the second has nothing to learn from in the first step, both in the second."""
    rank = dist.get_rank()
    groups = open_mesh_groups(RankGroup(rank, 2), Layout(data=2), torch.device("cpu"), 30.0, num_replica_groups=2)
    home = groups.replica_group
    vote = LocalSgdVote(home.world, groups.world, (), clip=0.0, num_replica_groups=2, contributes=True)
    nothing = (number(0.0), number(0.0), number(0.0))
    something = (number(3.0), number(2.0), number(16.0))
    verdicts = [
        vote.cast(Ballot(*(nothing if rank else something), {}, num_bad=rank), torch.tensor(1.0), is_sync_step=False),
        vote.cast(Ballot(*nothing, {}, num_bad=1), torch.tensor(1.0), is_sync_step=True),
    ]
    return [(verdict.taken.item(), verdict.read()) for verdict in verdicts]


def test_who_has_nothing_to_learn_from_is_not_against_a_step() -> None:
    for rank, ((own, first), (_, second)) in enumerate(run_world(with_idle_replica, 2)):
        assert own == (0.0 if rank else 1.0), "it changes nothing itself"
        assert (first.taken, first.is_empty, first.num_bad) == (True, False, 1)
        assert (first.loss, first.grad_norm, first.loss_scale) == (1.5, 2.0, 1.0)
        assert (second.taken, second.is_empty, second.num_bad) == (False, True, 2)
