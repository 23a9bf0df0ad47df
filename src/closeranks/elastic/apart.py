"""How do replicas that train apart vote?

[Note: votes apart] Between meetings a replica votes among its own ranks: whether *it* takes the step, and by which
factor, follows from its own sums, and nothing is heard of the others. What each step came to is written down, a row for
a step. At a meeting one sum over all ranks adds up the rows of the round; from then on every rank can read what the
steps came to over all replicas, what was wished for in any of them, and act on it, all at the same step.

Invariants: no collective leaves a replica but the one that closes a round; every rank reads the same bits of every
step, so all act on a request together, and only at meetings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from closeranks.core.protocols import Group
from closeranks.elastic.vote import NONFINITE, NUM_DERIVED, WEIGHT, Ballot, Outcome, Verdict, Vote, sizes_of


class ApartVerdict(Verdict):
    """A replica's own verdict on a step: what all came to is known once the round is closed."""

    def __init__(self, sums: Tensor, settled: Tensor, names: Sequence[str], extra: Mapping[str, int]) -> None:
        super().__init__(sums, settled, names, extra)
        self.is_closed = False
        self.row = torch.cat([sums, _of_idle(sums, settled)])
        self._told: Verdict | None = None

    def close(self, row: Tensor, num_homes: int) -> None:
        """``row``: added up over the replicas. A step counts as taken where all took it that had anything to learn
        from; its norm is the mean of theirs, its loss scale that of all."""
        sums, settled, num_busy = row[: -NUM_DERIVED - 1], row[-NUM_DERIVED - 1 : -1], row[-1]
        taken, factor, norm, loss_scale = settled
        is_taken = (taken >= num_homes) & (num_busy > 0)
        told = [is_taken.to(row.dtype), factor / num_homes, norm / num_busy, loss_scale / num_homes]
        self.is_closed = True
        self._told = Verdict(sums, torch.stack(told), self._names, self._sizes)

    def read(self) -> Outcome:
        assert self._told is not None, "a step is read when its round is closed"
        return self._told.read()


def _of_idle(sums: Tensor, settled: Tensor) -> Tensor:
    """What a replica says of a step, and 1 where it had anything to learn from. One that had not, since its samples
    were bad or there were too few for all, is not against the step."""
    is_busy = (sums[WEIGHT] != 0) | (sums[NONFINITE] > 0)
    agrees = torch.stack([torch.ones_like(settled[0]), settled[1], torch.zeros_like(settled[0]), settled[3]])
    return torch.cat([torch.where(is_busy, settled, agrees), is_busy.to(settled.dtype).view(1)])


class ApartVote(Vote):
    """``home`` are the ranks of one replica, ``world`` all of them; ``num_homes`` replicas train apart, and one rank of
    each speaks for it."""

    def __init__(
        self, home: Group, world: Group, metrics: Sequence[str], *, clip: float, num_homes: int, speaks: bool
    ) -> None:
        super().__init__(home, metrics, clip=clip)
        self._world, self._num_homes, self._speaks = world, num_homes, speaks
        self._round: list[ApartVerdict] = []

    def cast(self, ballot: Ballot, loss_scale: Tensor, *, is_boundary: bool = True) -> Verdict:
        sums, settled = self._settled(ballot, loss_scale)
        verdict = ApartVerdict(sums, settled, self._metrics, sizes_of(ballot))
        self._round.append(verdict)
        if is_boundary:
            self._close()
        return verdict

    def _close(self) -> None:
        """One matrix for the round: as many rows as it had steps, on all ranks alike."""
        closing, self._round = self._round, []
        rows = torch.stack([verdict.row for verdict in closing])
        told = self._world.sum(rows if self._speaks else torch.zeros_like(rows))
        for verdict, row in zip(closing, told, strict=True):
            verdict.close(row, self._num_homes)
