"""Random numbers at named counters: which value belongs to (key, counter, ...), whoever computes it and in which order?

The finaliser of splitmix64 is applied once per counter. Invariant: a word is a pure function of its key and counters,
the same bits on every machine; changing any constant below changes every run, and the tests pin them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]
Floats: TypeAlias = npt.NDArray[np.float64]

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def mix(mixed: Words) -> Words:
    """The finaliser of splitmix64, in place: callers pass a fresh array."""
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(MIX_1)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(MIX_2)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def words(key: int, *counters: npt.NDArray[Any]) -> Words:
    """One word for each combination of counters: arrays that broadcast against each other. About 10 ns a word and
    counter."""
    found = np.array([key], dtype=np.uint64)
    for counter in counters:
        found = mix((found ^ mix(np.atleast_1d(counter).astype(np.uint64) * np.uint64(GOLDEN))) + np.uint64(GOLDEN))
    return found


def uniform(drawn: Words) -> Floats:
    """Numbers in [0, 1), from the top 53 bits of each word."""
    return np.asarray(drawn >> np.uint64(11), dtype=np.float64) * 2.0**-53
