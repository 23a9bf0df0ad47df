"""How are numbers in any order read container by container: files, shards, row groups, batches?

Containers follow one another; ``firsts`` says at which number each begins, and how many there are at its end.
Invariant: every number is in exactly one span, under its position in what was asked for, and each container comes once,
so that it is opened or decoded once per read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from closeranks.data.dataset_protocol import Ints


@dataclass(frozen=True, slots=True)
class ContainerSpan:
    """The numbers that lie in one container."""

    container: int
    positions: Ints
    """Where in the list asked for each of them stands."""
    inside: Ints
    """Each of them, counted from the container's begin, ascending."""


def spans(firsts: npt.NDArray[Any], numbers: Ints) -> Iterator[ContainerSpan]:
    """In the order of the containers. A number where several begin is in the last of these: the others are empty."""
    if len(numbers) == 0:
        return
    order = np.argsort(numbers, kind="stable")
    ascending = numbers[order]
    containers = np.searchsorted(firsts, ascending, side="right") - 1
    cuts = [0, *(np.flatnonzero(np.diff(containers)) + 1).tolist(), len(numbers)]
    for begin, end in pairwise(cuts):
        container = int(containers[begin])
        yield ContainerSpan(container, order[begin:end], ascending[begin:end] - int(firsts[container]))
