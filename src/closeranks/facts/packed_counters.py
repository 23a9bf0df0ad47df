"""Small counters, several of them packed into one float64, that add up exactly when such vectors are summed.

Invariant: as long as no counter exceeds ``most``, sums in any order give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_DIGITS = 52
"""Integers of this many bits are exact in float64."""


class PackedCounters:
    """One small counter for each name, several in one float64; sums of such vectors give the sums of the counters."""

    def __init__(self, names: Sequence[str], most: int) -> None:
        """``most``: the largest value that a counter can reach."""
        width = most.bit_length()
        self.base = 2.0**width
        self.places = {name: divmod(number, _DIGITS // width) for number, name in enumerate(names)}
        self.size = num_values(len(names), most)

    def encode(self, names: Iterable[str]) -> list[float]:
        """The vector in which the counters of these names are one."""
        values = [0.0] * self.size
        for name in names:
            index, digit = self.places[name]
            values[index] += self.base**digit
        return values

    def zero_names(self, values: Sequence[float], names: Iterable[str]) -> set[str]:
        """Those of the names whose counters are zero."""
        whole = [int(value) for value in values]
        base = int(self.base)
        return {name for name in names if not whole[self.places[name][0]] // base ** self.places[name][1] % base}


def num_values(num_counters: int, most: int) -> int:
    """The number of float64 values that ``num_counters`` counters take."""
    return -(-num_counters // (_DIGITS // most.bit_length()))
