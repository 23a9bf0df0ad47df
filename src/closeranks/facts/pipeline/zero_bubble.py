"""Inserts the deferred weight gradients into a zero-bubble schedule.

A rank computes them whenever it would otherwise wait, and when it must free memory before the next forward. Invariant:
the order of the given actions is kept, every stage's weight gradients come in the order of its input gradients, and no
rank holds more micro-batches than the fullest rank would if none were deferred.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from closeranks.facts.pipeline.actions import Action, completed_actions, dependencies

ACTION_TIMES = {"F": 1, "B": 2, "I": 1, "W": 1}
"""The time of each kind of action in a balanced pipeline, in units of a forward."""

Ends = dict[Action, int]


def insert_weight_gradients(orders: Iterable[Sequence[Action]], num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """Each order with a ``W`` for each of its ``I``; one without any ``I`` is returned unchanged.

    Where orders deadlock, the rest of them is returned unchanged: reporting that is the validation's task.
    """
    given = [tuple(order) for order in orders]
    room = max(peak_held(order, released_by="BI") for order in given)
    workers = [_Worker(deque(order), room) for order in given]
    ends: Ends = {}
    now = 0
    while True:
        for worker in workers:
            if worker.free_at <= now:
                worker.act(now, ends, num_stages)
        later = [worker.free_at for worker in workers if worker.free_at > now]
        if not later:
            return tuple((*worker.done, *worker.order) for worker in workers)
        now = min(later)


def peak_held(order: Iterable[Action], released_by: str = "BW") -> int:
    """The peak number of micro-batches that a rank holds in all its stages, each from its forward until its release."""
    held = most = 0
    for action in order:
        held += (action.kind == "F") - (action.kind in released_by)
        most = max(most, held)
    return most


@dataclass(slots=True)
class _Worker:
    """A rank in a balanced pipeline whose messages take no time."""

    order: deque[Action]
    room: int
    free_at: int = 0
    held: int = 0
    deferred: deque[Action] = field(default_factory=deque)
    done: list[Action] = field(default_factory=list)

    def act(self, now: int, ends: Ends, num_stages: int) -> None:
        """Start the next action if it can start, else a deferred weight gradient if there is one, else nothing."""
        if self.order and self._may(self.order[0], now, ends, num_stages):
            action = self.order.popleft()
        elif self.deferred:
            action = self.deferred.popleft()
        else:
            return
        if action.kind == "I":
            self.deferred.append(Action(action.stage, "W", action.micro))
        self.held += (action.kind == "F") - (action.kind in "BW")
        self.free_at = now + ACTION_TIMES[action.kind]
        self.done.append(action)
        ends.update(dict.fromkeys(completed_actions(action), self.free_at))

    def _may(self, action: Action, now: int, ends: Ends, num_stages: int) -> bool:
        """A whole backward also waits for its stage's earlier weight gradients, so that they are summed in order."""
        has_room = action.kind != "F" or self.held < self.room
        is_in_turn = action.kind != "B" or all(weight.stage != action.stage for weight in self.deferred)
        return (
            has_room and is_in_turn and all(ends.get(need, now + 1) <= now for need in dependencies(action, num_stages))
        )
