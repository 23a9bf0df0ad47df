"""Pipeline schedules: the order in which each rank processes its stages' micro-batches.

A schedule is data: a list of actions per rank. The orders are the published ones; a zero-bubble schedule is given as
the order of its forwards and input gradients, and weight gradients then fill the waits (``zero_bubble``). Invariant:
every schedule made here is valid for every number of ranks and micro-batches, and each stage takes its micro-batches
in ascending order, so that gradients are summed in the order in which one process sums them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise, zip_longest
from typing import ClassVar

from closeranks.core.errors import UserError
from closeranks.facts.pipeline.actions import Action, ActionKind
from closeranks.facts.pipeline.stages import stage_placement
from closeranks.facts.pipeline.zero_bubble import insert_weight_gradients


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """What each rank computes, in order; as text its name, then a line of actions per rank."""

    name: str
    num_micro: int
    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[tuple[int, ...], ...]
    """The stages of each rank."""

    is_lowered: ClassVar[bool] = False
    """Whether sends and receives are written out."""

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        return sum(map(len, self.placement))

    def __str__(self) -> str:
        return "\n".join([self.name, *(" ".join(map(str, actions)) for actions in self.ranks)])

    @classmethod
    def parse(cls, text: str) -> PipelineSchedule:
        """Read the output of ``str``, or a handwritten schedule: a stage is on the rank that has its actions."""
        name, *lines = text.splitlines() or [""]
        ranks = tuple(tuple(map(Action.parse, line.split())) for line in lines)
        num_micro = max((action.micro + 1 for action in chain(*ranks)), default=0)
        return cls(name, num_micro, ranks, tuple(tuple(sorted({a.stage for a in actions})) for actions in ranks))


@cache
def schedule_for(name: str, num_ranks: int, num_micro: int) -> PipelineSchedule:
    """The schedule of this name for any number of ranks and micro-batches.

    ``zbv`` needs 2P-1 micro-batches: with fewer, the schedule is made for that many, and the missing ones are dropped
    (the rest of a valid order is valid). ``dualpipev`` needs 2P, and falls back to ``zbv`` with fewer: there is no
    middle left, and the ends wait less in ``zbv``. The interleaved orders take micro-batches in rounds of P; where P
    does not divide their number the rounds are larger, by as little as possible, which costs memory and keeps the
    bubble small.
    """
    places = stage_placement(name, num_ranks)
    if num_micro < 1:
        raise UserError(f"a schedule of {num_micro} micro-batches has nothing to do", "Give it at least 1.")
    make = _ORDERS[name]
    orders = [
        [action for action in make(rank, num_ranks, num_micro) if action.micro < num_micro] for rank in range(num_ranks)
    ]
    return PipelineSchedule(name, num_micro, insert_weight_gradients(orders, sum(map(len, places))), places)


def _gpipe(rank: int, num_ranks: int, num_micro: int) -> list[Action]:
    """All forwards, then all backwards."""
    return _ahead(_row(rank, "F", num_micro), _row(rank, "B", num_micro), num_micro)


def _1f1b(rank: int, num_ranks: int, num_micro: int) -> list[Action]:
    """As many warm-up forwards as there are later stages, then one backward for each further forward."""
    return _ahead(_row(rank, "F", num_micro), _row(rank, "B", num_micro), num_ranks - rank - 1)


def _looped_bfs(rank: int, num_ranks: int, num_micro: int) -> list[Action]:
    """All forwards of the first stage, then of the second; backwards in the reverse order."""
    first, second = rank, num_ranks + rank
    forwards = [*_row(first, "F", num_micro), *_row(second, "F", num_micro)]
    return _ahead(forwards, [*_row(second, "B", num_micro), *_row(first, "B", num_micro)], len(forwards))


def _interleaved_1f1b(rank: int, num_ranks: int, num_micro: int) -> list[Action]:
    return _interleaved(rank, num_ranks, num_micro, "B", 2)


def _interleaved_zero_bubble(rank: int, num_ranks: int, num_micro: int) -> list[Action]:
    """Half as many warm-up forwards as interleaved 1F1B: input gradients alone come back in half the time."""
    return _interleaved(rank, num_ranks, num_micro, "I", 1)


def _interleaved(rank: int, num_ranks: int, num_micro: int, backward: ActionKind, step: int) -> list[Action]:
    """Rounds of micro-batches, each through both stages; ``step`` more warm-up forwards for each later rank."""
    num_rounds = max(1, num_micro // num_ranks)
    cuts = [number * num_micro // num_rounds for number in range(num_rounds + 1)]
    rounds = [range(first, last) for first, last in pairwise(cuts)]
    first, second = rank, num_ranks + rank
    forwards = [Action(stage, "F", micro) for round_ in rounds for stage in (first, second) for micro in round_]
    backwards = [Action(stage, backward, micro) for round_ in rounds for stage in (second, first) for micro in round_]
    return _ahead(forwards, backwards, max(map(len, rounds)) + step * (num_ranks - rank - 1))


def _row(stage: int, kind: ActionKind, num_micro: int) -> list[Action]:
    return [Action(stage, kind, micro) for micro in range(num_micro)]


def _ahead(forwards: Sequence[Action], backwards: Sequence[Action], num_ahead: int) -> list[Action]:
    """``num_ahead`` warm-up forwards, then forwards and backwards alternately, then the remaining backwards."""
    turns = zip_longest(forwards[num_ahead:], backwards)
    return [*forwards[:num_ahead], *(action for turn in turns for action in turn if action is not None)]


@dataclass(frozen=True, slots=True)
class SchedulePattern:
    """A pattern that a rank of a V-shaped schedule repeats: ``F0`` is the next forward of its first stage, ``I1`` the
    next input gradient of its second."""

    times: int
    pattern: str


def _zbv(rank: int, num_ranks: int, num_micro: int) -> list[Action]:
    """Zero bubble on a V: the memory of 1F1B, and no wait except while the first micro-batch goes down the ranks."""
    num_micro, below = max(num_micro, 2 * num_ranks - 1), num_ranks - rank - 1
    phases = (
        SchedulePattern(2 * below + 1, "F0"),
        SchedulePattern(rank, "F1 F0"),
        SchedulePattern(below + 1, "F1 I1"),
        SchedulePattern(num_micro - 2 * num_ranks + 1 + rank, "F0 I0 F1 I1"),
        SchedulePattern(below, "I0 F1 I1"),
        SchedulePattern(rank, "I0 I1"),
        SchedulePattern(below + 1, "I0"),
    )
    return _v_order(rank, num_ranks, phases)


def _dualpipev(rank: int, num_ranks: int, num_micro: int) -> list[Action]:
    """A V whose middle pairs each forward with a whole backward of the other stage; only the ends are split."""
    if num_micro < 2 * num_ranks:
        return _zbv(rank, num_ranks, num_micro)
    below = num_ranks - rank - 1
    half, is_odd = divmod(rank + 1, 2)
    phases = (
        SchedulePattern(2 * below, "F0"),
        SchedulePattern(rank + 1, "F0 F1"),
        SchedulePattern(below, "I1 F1"),
        SchedulePattern(num_micro - 2 * num_ranks + 1 + rank, "F0 B1 F1 B0"),
        SchedulePattern(below, "B1 F1 B0"),
        SchedulePattern(half, "B1 B0"),
        SchedulePattern(is_odd, "B1 I0"),
        SchedulePattern(half, "I1 I0"),
        SchedulePattern(below, "I0"),
    )
    return _v_order(rank, num_ranks, phases)


def _v_order(rank: int, num_ranks: int, phases: Sequence[SchedulePattern]) -> list[Action]:
    stages = {"0": rank, "1": 2 * num_ranks - 1 - rank}
    kinds: dict[str, ActionKind] = {"F": "F", "B": "B", "I": "I"}
    counted: Counter[tuple[bool, int]] = Counter()
    order = []
    for word in chain(*(phase.pattern.split() * phase.times for phase in phases)):
        kind, stage = kinds[word[0]], stages[word[1]]
        order.append(Action(stage, kind, counted[kind == "F", stage]))
        counted[kind == "F", stage] += 1
    return order


_ORDERS: dict[str, Callable[[int, int, int], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved-1f1b": _interleaved_1f1b,
    "looped-bfs": _looped_bfs,
    "interleaved-zero-bubble": _interleaved_zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
