"""The vote under Local SGD and DiLoCo, where replicas synchronize only at an outer step.

[Note: local SGD votes] Between two outer steps a replica votes among its own ranks: whether *it* takes the step, and
the gradient factor, follow from its own sums, without communication with other replicas. The result of each step is
kept as one row. At the outer step a single all-reduce over all ranks sums the rows of the synchronization interval;
only then can every rank read the result of these steps over all replicas and the requests made in any of them, and act
on them, all at the same step.

Invariants: the only collective across replicas is the one that closes a synchronization interval; every rank reads the
same bits for every step, so all ranks act on a request together, and only at outer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from closeranks.core import requests
from closeranks.core.protocols import ReduceGroup
from closeranks.core.requests import RunRequest
from closeranks.elastic.vote import (
    NONFINITE,
    NUM_DERIVED,
    REQUESTS,
    WEIGHT,
    Ballot,
    StepOutcome,
    Verdict,
    Vote,
    sizes_of,
)


class LocalSgdVerdict(Verdict):
    """A replica's own verdict on a step; the result over all replicas is known once the synchronization interval is
    closed."""

    def __init__(self, sums: Tensor, settled: Tensor, names: Sequence[str], extra: Mapping[str, int]) -> None:
        super().__init__(sums, settled, names, extra)
        self.is_closed = False
        self.row = torch.cat([sums, _contribution(sums, settled)])
        self._verdict: Verdict | None = None

    def close_interval(self, row: Tensor, num_replica_groups: int) -> None:
        """``row``: summed over the replicas. A step counts as taken if every replica with usable samples took it; its
        gradient norm is the mean over those replicas, its loss scale the mean over all."""
        sums, settled, num_busy = row[: -NUM_DERIVED - 1], row[-NUM_DERIVED - 1 : -1], row[-1]
        taken, factor, norm, loss_scale = settled
        is_taken = (taken >= num_replica_groups) & (num_busy > 0)
        derived = [
            is_taken.to(row.dtype),
            factor / num_replica_groups,
            norm / num_busy,
            loss_scale / num_replica_groups,
        ]
        self.is_closed = True
        self._verdict = Verdict(sums, torch.stack(derived), self._names, self._sizes)

    def read(self) -> StepOutcome:
        assert self._verdict is not None, "a step is read when its round is closed"
        return self._verdict.read()


def _contribution(sums: Tensor, settled: Tensor) -> Tensor:
    """What a replica contributes to a step, followed by 1 if it had usable samples, else 0. A replica without any,
    because its samples were bad or there were too few for all, does not vote against the step."""
    is_busy = (sums[WEIGHT] != 0) | (sums[NONFINITE] > 0)
    agrees = torch.stack([torch.ones_like(settled[0]), settled[1], torch.zeros_like(settled[0]), settled[3]])
    return torch.cat([torch.where(is_busy, settled, agrees), is_busy.to(settled.dtype).view(1)])


class LocalSgdVote(Vote):
    """``replica``: the ranks of this replica; ``world``: all ranks; ``num_replica_groups``: the number of replicas
    under Local SGD or DiLoCo. ``contributes`` is true on one rank of each replica, which contributes the replica's
    rows."""

    def __init__(
        self,
        replica: ReduceGroup,
        world: ReduceGroup,
        metrics: Sequence[str],
        *,
        clip: float,
        num_replica_groups: int,
        contributes: bool,
    ) -> None:
        super().__init__(replica, metrics, clip=clip)
        self._world, self._num_replica_groups, self._contributes = world, num_replica_groups, contributes
        self._round: list[LocalSgdVerdict] = []

    def cast(self, ballot: Ballot, loss_scale: Tensor, *, is_sync_step: bool = True) -> Verdict:
        sums, settled = self._settled(ballot, loss_scale)
        verdict = LocalSgdVerdict(sums, settled, self._metrics, sizes_of(ballot))
        self._round.append(verdict)
        if is_sync_step:
            self._close()
        return verdict

    def _close(self) -> None:
        """All-reduce one matrix for the synchronization interval: one row per step, the same number on all ranks."""
        closing, self._round = self._round, []
        rows = torch.stack([verdict.row for verdict in closing])
        summed = self._world.sum(self._contribution(rows))
        for verdict, row in zip(closing, summed, strict=True):
            verdict.close_interval(row, self._num_replica_groups)

    def _contribution(self, rows: Tensor) -> Tensor:
        return rows if self._contributes else torch.zeros_like(rows)


class BackupVote(LocalSgdVote):
    """Some ballots are dropped, with the late push that they go with. Their requests must not be lost: each rank adds
    them to the last row of the interval. ``is_dropped``: whether this rank's ballot on the latest step was."""

    is_dropped: Callable[[], bool]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._dropped: frozenset[RunRequest] = frozenset()

    def _settled(self, ballot: Ballot, loss_scale: Tensor) -> tuple[Tensor, Tensor]:
        settled = super()._settled(ballot, loss_scale)
        if self.is_dropped():
            self._dropped |= ballot.requests
        return settled

    def _contribution(self, rows: Tensor) -> Tensor:
        rows = super()._contribution(rows)
        dropped, self._dropped = self._dropped, frozenset()
        if dropped:
            rows[-1, REQUESTS] += torch.tensor(requests.encode(dropped), dtype=rows.dtype, device=rows.device)
        return rows
