"""The synchronization schedule of Local SGD and DiLoCo: at which steps replicas synchronize, and which fragments.

With one fragment the whole model is synchronized every ``every`` steps; with several, one of them is every
``every / num_fragments`` steps, in turn, so that each is still synchronized every ``every`` steps and never more than
one at a time. Pure: a function of the step number alone, so that all ranks, a resumed run and a shortened one agree
without communication. Invariants: the last step of a run synchronizes everything; without local SGD every step counts
as a synchronization at which nothing is left to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from closeranks.sync.config import SyncConfig


@dataclass(frozen=True, slots=True)
class SyncSchedule:
    """A step number counts finished steps: the first step of a run is step 1."""

    every: int = 0
    """0: no local SGD."""
    num_fragments: int = 1
    num_steps: int = 0
    """Of the whole run."""

    @classmethod
    def from_config(cls, sync: SyncConfig, num_steps: int) -> SyncSchedule:
        local = sync.local
        every = local.every if sync.server.waits_for_all else sync.server.every
        return cls(every, local.fragments if local.is_on else 1, num_steps)

    @property
    def sync_interval(self) -> int:
        """Steps between two synchronizations."""
        return max(1, self.every // self.num_fragments)

    def is_sync_step(self, step: int) -> bool:
        """Whether replicas synchronize after ``step``; before the first step they count as synchronized."""
        return step % self.sync_interval == 0 or step == self.num_steps

    def refusal(self, step: int) -> tuple[str, str]:
        """Why an action of all replicas together cannot happen after ``step``, and what to do; empty where it can."""
        if self.is_sync_step(step):
            return "", ""
        fix = f"Call it at an outer step: the next one is after step {self.next_sync(step)}."
        return "between outer steps", fix

    def fragments(self, step: int) -> tuple[int, ...]:
        """The fragments that are synchronized after ``step``."""
        if not self.every or not step:
            return ()
        if step == self.num_steps:
            return tuple(range(self.num_fragments))
        turn, rest = divmod(step, self.sync_interval)
        return () if rest else ((turn - 1) % self.num_fragments,)

    def previous_sync(self, step: int) -> int:
        """The last synchronization before ``step``."""
        return (step - 1) // self.sync_interval * self.sync_interval

    def next_sync(self, step: int) -> int:
        """The next synchronization after ``step``."""
        return min((step // self.sync_interval + 1) * self.sync_interval, max(self.num_steps, step + 1))

    def num_syncs(self, step: int) -> int:
        """The number of synchronizations of a run up to and including ``step``."""
        return step // self.sync_interval + (step == self.num_steps and step % self.sync_interval > 0)

    def is_due(self, step: int, every: int) -> bool:
        """Whether an action that is due every ``every`` steps (0: never) is due at ``step``. It runs at
        synchronizations only, for all steps since the previous one."""
        return every > 0 and self.is_sync_step(step) and step // every > self.previous_sync(step) // every


def assign_fragments(sizes: Mapping[str, int], blocks: Sequence[str], num_fragments: int) -> dict[str, int]:
    """The fragment of every parameter. ``sizes``: their numbers of elements, in the order of the model.

    Blocks are assigned round-robin, so that every fragment has some from all depths; a parameter outside all blocks
    goes with the nearest block before it, or the first. A model with fewer blocks than fragments is divided in its own
    order, by size.
    """
    if num_fragments == 1:
        return dict.fromkeys(sizes, 0)
    block_of = {name: next((at for at, b in enumerate(blocks) if name.startswith(f"{b}.")), None) for name in sizes}
    used = sorted({block for block in block_of.values() if block is not None})
    if len(used) < num_fragments:
        return _by_size(sizes, num_fragments)
    found, last = dict[str, int](), 0
    for name, block in block_of.items():
        last = last if block is None else used.index(block)
        found[name] = last % num_fragments
    return found


def _by_size(sizes: Mapping[str, int], num_fragments: int) -> dict[str, int]:
    """No fragment is empty where there are enough parameters."""
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
