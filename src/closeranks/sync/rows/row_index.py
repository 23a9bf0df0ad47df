"""Where is the row of a key? A sorted list of millions of keys that grows in every step, in a few arrays.

Most keys are in one long sorted run, the newest in a short one, which is merged into the long one once it has an eighth
of its length: a key is moved a few times in all, not whenever another is added. Invariant: slots are the numbers of
keys in the order in which they were added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from closeranks.core.table_rows import Ints

_SHARE, _SHORT = 8, 4096
ABSENT = -1


@dataclass(frozen=True, slots=True)
class _Run:
    """Keys in ascending order, each with its slot."""

    keys: Ints
    slots: Ints

    def find(self, keys: Ints, found: Ints) -> None:
        """Fill in the slots of the keys that are here."""
        if not len(self.keys):
            return
        places = np.searchsorted(self.keys, keys)
        places[places == len(self.keys)] = 0
        is_here = self.keys[places] == keys
        found[is_here] = self.slots[places[is_here]]

    def merged(self, keys: Ints, slots: Ints) -> _Run:
        """A stable sort of runs that are sorted already takes one pass."""
        keys, slots = np.concatenate([self.keys, keys]), np.concatenate([self.slots, slots])
        order = np.argsort(keys, kind="stable")
        return _Run(keys[order], slots[order])


_NOTHING = _Run(np.empty(0, np.int64), np.empty(0, np.int64))


class RowIndex:
    """16 bytes a key."""

    def __init__(self) -> None:
        self._long = self._short = _NOTHING

    def __len__(self) -> int:
        return len(self._long.keys) + len(self._short.keys)

    def find(self, keys: Ints) -> Ints:
        """The slot of each key, ``ABSENT`` for those that were never added."""
        found = np.full(len(keys), ABSENT, np.int64)
        self._long.find(keys, found)
        self._short.find(keys, found)
        return found

    def add(self, keys: Ints) -> None:
        """Distinct keys that are absent, in any order: they take the next slots."""
        slots = np.arange(len(self), len(self) + len(keys))
        self._short = self._short.merged(keys, slots)
        if len(self._short.keys) > max(_SHORT, len(self._long.keys) // _SHARE):
            self._long, self._short = self._long.merged(self._short.keys, self._short.slots), _NOTHING
