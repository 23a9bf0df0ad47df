"""At which steps do replicas that train apart meet, and which fragments of the model meet there?

A round is the steps from one meeting to the next. With one fragment all of the model meets every ``every`` steps; with
several, one of them does every ``every / num_fragments`` steps, in turn, so that each still meets every ``every`` steps
and never more than one of them travels at a time. Pure: a function of the number of a step alone, so that all ranks, a
resumed run and one that was cut short agree without asking. Invariants: the last step of a run is a meeting of
everything; where replicas do not train apart, every step is a meeting at which nothing is left to be done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from closeranks.sync.config import SyncConfig


@dataclass(frozen=True, slots=True)
class Rounds:
    """Steps are counted as finished ones: the first step of a run is step 1."""

    every: int = 0
    """0: nobody trains apart."""
    num_fragments: int = 1
    num_steps: int = 0
    """Of the whole run."""

    @classmethod
    def of(cls, sync: SyncConfig, num_steps: int) -> Rounds:
        local = sync.local
        return cls(local.every, local.fragments if local.is_on else 1, num_steps)

    @property
    def gap(self) -> int:
        """Steps between two meetings."""
        return max(1, self.every // self.num_fragments)

    def is_boundary(self, step: int) -> bool:
        """Whether all replicas stand together after ``step``; before the first step they do."""
        return step % self.gap == 0 or step == self.num_steps

    def refusal(self, step: int) -> tuple[str, str]:
        """Why nothing that all ranks do together can happen after ``step``, and what to do; empty where it can."""
        if self.is_boundary(step):
            return "", ""
        fix = f"Call it when they have met: the next time is after step {self.after(step)}."
        return "while replicas train apart", fix

    def fragments(self, step: int) -> tuple[int, ...]:
        """What meets after ``step``."""
        if not self.every or not step:
            return ()
        if step == self.num_steps:
            return tuple(range(self.num_fragments))
        turn, rest = divmod(step, self.gap)
        return () if rest else ((turn - 1) % self.num_fragments,)

    def before(self, step: int) -> int:
        """The last meeting before ``step``."""
        return (step - 1) // self.gap * self.gap

    def after(self, step: int) -> int:
        """The next meeting after ``step``."""
        return min((step // self.gap + 1) * self.gap, max(self.num_steps, step + 1))

    def number(self, step: int) -> int:
        """How many meetings a run has had after ``step``."""
        return step // self.gap + (step == self.num_steps and step % self.gap > 0)

    def passes(self, step: int, every: int) -> bool:
        """Whether what is due every so many steps (0: never) is due at ``step``: at a meeting, for all of its round."""
        return every > 0 and self.is_boundary(step) and step // every > self.before(step) // every


def part(sizes: Mapping[str, int], blocks: Sequence[str], num_fragments: int) -> dict[str, int]:
    """The fragment of every parameter. ``sizes``: their elements, in the order of the model.

    Blocks are dealt out in turn, so that every fragment has some from all depths; what stands in no block goes with the
    nearest one before it, or the first. A model with fewer blocks than fragments is cut in its own order, by size.
    """
    if num_fragments == 1:
        return dict.fromkeys(sizes, 0)
    places = {name: next((at for at, b in enumerate(blocks) if name.startswith(f"{b}.")), None) for name in sizes}
    used = sorted({place for place in places.values() if place is not None})
    if len(used) < num_fragments:
        return _by_size(sizes, num_fragments)
    found, last = dict[str, int](), 0
    for name, place in places.items():
        last = last if place is None else used.index(place)
        found[name] = last % num_fragments
    return found


def _by_size(sizes: Mapping[str, int], num_fragments: int) -> dict[str, int]:
    """Nobody goes without one where there are enough parameters."""
    names, total = list(sizes), max(1, sum(sizes.values()))
    found, passed, fragment = dict[str, int](), 0, 0
    for number, name in enumerate(names):
        num_left = num_fragments - 1 - fragment
        is_full = number and passed * num_fragments >= total * (fragment + 1)
        if num_left and found and (is_full or len(names) - number <= num_left):
            fragment += 1
        found[name] = fragment
        passed += sizes[name]
    return found
