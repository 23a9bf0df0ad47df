"""Validates a schedule or program: it runs to its end without deadlock, and does everything exactly once.

The validation first counts the steps, then simulates those of all ranks in their order. In a program a send waits until
its receive is reached and a receive until its send is, both in program order: the strictest behaviour of a transport,
so what passes here cannot deadlock on a more lenient one. Invariant: nothing that would deadlock, skip or repeat work
passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from closeranks.facts.pipeline.actions import ActionText


class ActionLike(Protocol):
    """An action of a schedule or an instruction of a program."""

    @property
    def stage(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def micro(self) -> int: ...


class ScheduleLike(Protocol):
    """A schedule or a program."""

    @property
    def ranks(self) -> Sequence[Sequence[ActionLike]]: ...
    @property
    def placement(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def num_micro(self) -> int: ...
    @property
    def is_lowered(self) -> bool: ...


def first_problem(plan: ScheduleLike) -> str | None:
    """The first problem, in one sentence; None where there is none."""
    misplaced = _misplaced(plan.placement)
    if misplaced is not None:
        return misplaced
    case = _Case(
        rows=tuple(tuple(ActionText(step.stage, step.kind, step.micro) for step in steps) for steps in plan.ranks),
        stages=plan.placement,
        rank_of={stage: rank for rank, stages in enumerate(plan.placement) for stage in stages},
        num_micro=plan.num_micro,
        is_lowered=plan.is_lowered,
    )
    return next(_miscounted(case), None) or _blocked(case)


@dataclass(frozen=True, slots=True)
class _Case:
    """A plan as plain text parts, and the rank of each stage."""

    rows: tuple[tuple[ActionText, ...], ...]
    stages: tuple[tuple[int, ...], ...]
    rank_of: Mapping[int, int]
    num_micro: int
    is_lowered: bool

    def sends(self, stage: int, other: int) -> bool:
        """Whether data from one stage to the other is sent as a message."""
        return self.is_lowered and other in self.rank_of and self.rank_of[other] != self.rank_of[stage]


def _misplaced(placement: Sequence[Sequence[int]]) -> str | None:
    for stage in range(max((stage for stages in placement for stage in stages), default=0) + 1):
        owners = [rank for rank, stages in enumerate(placement) if stage in stages]
        if len(owners) != 1:
            return f"stage {stage} is on {f'the ranks {owners}' if owners else 'no rank'}, not on exactly one"
    return None


# Counting: every rank has exactly the steps that its stages require.


def _miscounted(case: _Case) -> Iterator[str]:
    for rank, row in enumerate(case.rows):
        counted = Counter(row)
        expected = dict.fromkeys(_expected(case, rank, counted))
        for action, times in counted.items():
            if action not in expected:
                yield f"rank {rank} has {action}, but {_why_foreign(case, rank, action)}"
            if times > 1:
                yield f"rank {rank} has {action} {times} times"
        yield from (f"rank {rank} lacks {action}" for action in expected if action not in counted)


def _expected(case: _Case, rank: int, counted: Mapping[ActionText, int]) -> Iterator[ActionText]:
    """A backward is expected whole, unless the plan has a half of it and no whole one."""
    for stage in case.stages[rank]:
        for micro in range(case.num_micro):
            is_split = any(ActionText(stage, kind, micro) in counted for kind in "IW")
            is_whole = ActionText(stage, "B", micro) in counted or not is_split
            kinds = ["F", "B"] if is_whole else ["F", "I", "W"]
            kinds += ["RECV_F", "SEND_B"] if case.sends(stage, stage - 1) else []
            kinds += ["SEND_F", "RECV_B"] if case.sends(stage, stage + 1) else []
            yield from (ActionText(stage, kind, micro) for kind in kinds)


def _why_foreign(case: _Case, rank: int, action: ActionText) -> str:
    if case.rank_of.get(action.stage) != rank:
        return f"stage {action.stage} is on rank {case.rank_of.get(action.stage, 'none')}"
    if action.micro >= case.num_micro:
        return f"there are only {case.num_micro} micro-batches"
    if action.kind in ("I", "W"):
        return f"{action.stage}B{action.micro} is the whole backward already"
    return "there is nothing to send"


# Simulation: every step is reached.


def _blocked(case: _Case) -> str | None:
    """Simulate until no rank can advance; the reason if steps are left."""
    run = _Run(case, [0] * len(case.rows), set())
    moves = True
    while moves:
        moves = False
        for rank in range(len(case.rows)):
            while run.head(rank) is not None and run.awaited(rank) is None:
                run.move(rank)
                moves = True
    return _why_stuck(run) if any(run.head(rank) is not None for rank in range(len(case.rows))) else None


@dataclass(frozen=True, slots=True)
class _Run:
    case: _Case
    at: list[int]
    """The number of steps that each rank has done."""
    done: set[ActionText]

    def head(self, rank: int) -> ActionText | None:
        row = self.case.rows[rank]
        return row[self.at[rank]] if self.at[rank] < len(row) else None

    def awaited(self, rank: int) -> ActionText | None:
        """What the next step of a rank waits for: unfinished work, or the other end of its message."""
        action = self.head(rank)
        if action is None:
            return None
        work = self._undone(action)
        if work is not None:
            return work
        other = _other_end(action)
        if other is None or (self.head(self.case.rank_of[other.stage]) == other and self._undone(other) is None):
            return None
        return other

    def _undone(self, action: ActionText) -> ActionText | None:
        return next((need for need in _needs(self.case, action) if need not in self.done), None)

    def move(self, rank: int) -> None:
        """Advance past the next step of a rank and, for a message, past both its ends."""
        action = self.case.rows[rank][self.at[rank]]
        other = _other_end(action)
        for end in (action,) if other is None else (action, other):
            self.at[self.case.rank_of[end.stage]] += 1
            self.done.add(end)
            if end.kind == "B":
                self.done.update(ActionText(end.stage, part, end.micro) for part in "IW")


def _needs(case: _Case, action: ActionText) -> Iterator[ActionText]:
    """All dependencies are on the rank itself, except those on other ranks in a schedule without messages."""
    stage, micro = action.stage, action.micro
    if action.kind in ("B", "I", "SEND_F"):
        yield ActionText(stage, "F", micro)
    if action.kind in ("W", "SEND_B"):
        yield ActionText(stage, "I", micro)
    if action.kind == "F" and stage - 1 in case.rank_of:
        yield ActionText(stage, "RECV_F", micro) if case.sends(stage, stage - 1) else ActionText(stage - 1, "F", micro)
    if action.kind in ("B", "I") and stage + 1 in case.rank_of:
        yield ActionText(stage, "RECV_B", micro) if case.sends(stage, stage + 1) else ActionText(stage + 1, "I", micro)


def _other_end(action: ActionText) -> ActionText | None:
    match action.kind:
        case "SEND_F":
            return ActionText(action.stage + 1, "RECV_F", action.micro)
        case "RECV_F":
            return ActionText(action.stage - 1, "SEND_F", action.micro)
        case "SEND_B":
            return ActionText(action.stage - 1, "RECV_B", action.micro)
        case "RECV_B":
            return ActionText(action.stage + 1, "SEND_B", action.micro)
    return None


def _why_stuck(run: _Run) -> str:
    """Describes the deadlock: a step before its own dependency on the same rank, or a cycle of waiting ranks."""
    waits = {rank: need for rank in range(len(run.at)) if (need := run.awaited(rank)) is not None}
    for rank, need in waits.items():
        if run.case.rank_of[need.stage] == rank:
            return f"rank {rank} has {run.head(rank)} before {need}, which it needs"
    ring = [min(waits)]
    while (following := run.case.rank_of[waits[ring[-1]].stage]) not in ring:
        ring.append(following)
    ring = ring[ring.index(following) :]
    links = (f"rank {rank} is at {run.head(rank)} and needs {waits[rank]}" for rank in ring)
    return f"ranks wait for each other: {', '.join(links)}"
