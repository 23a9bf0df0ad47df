"""Groups requested numbers by the container that holds them: a file, shard, row group or batch.

Containers are consecutive; ``firsts`` has the first number of each, and after the last the total count. Invariant:
every requested number is in exactly one span, with its position in the request, and each container occurs once, so that
it is opened or decoded once per read.
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
    """The requested numbers in one container."""

    container: int
    positions: Ints
    """The position of each number in the request."""
    inside: Ints
    """Each number, relative to the start of the container, ascending."""


def spans(firsts: npt.NDArray[Any], numbers: Ints) -> Iterator[ContainerSpan]:
    """In the order of the containers. A number at which several begin is in the last of them: the others are empty."""
    if len(numbers) == 0:
        return
    order = np.argsort(numbers, kind="stable")
    ascending = numbers[order]
    containers = np.searchsorted(firsts, ascending, side="right") - 1
    cuts = [0, *(np.flatnonzero(np.diff(containers)) + 1).tolist(), len(numbers)]
    for begin, end in pairwise(cuts):
        container = int(containers[begin])
        yield ContainerSpan(container, order[begin:end], ascending[begin:end] - int(firsts[container]))
