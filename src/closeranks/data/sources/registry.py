"""The registry of data kinds, and the number of samples held out for evaluation.

A kind is one file with one function under ``@SOURCES.register(name)``. Invariant: the train and eval parts of one kind
are disjoint, and are determined by the job alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from closeranks.core.errors import DataError
from closeranks.core.protocols import DataSource
from closeranks.core.registry import Registry

Split: TypeAlias = Literal["train", "eval"]
Opener: TypeAlias = Callable[[Any, Split, int], DataSource | None]
"""(config, split, seed) -> the source, or None if the job holds out nothing for evaluation."""

SOURCES: Registry[Opener] = Registry("data")


def opener_of(name: str) -> Opener:
    """The opener of a built-in kind, or of the user's own data (``package.module:factory``)."""
    return SOURCES["user" if ":" in name else name]


def num_held_out(num_samples: int, fraction: float, identity: str) -> int:
    """Number of samples held out for evaluation: none at fraction 0, else at least one, and never all."""
    if fraction == 0.0:
        return 0
    if num_samples < 2:
        fix = "Use more data or shorter samples, or set data.eval_fraction = 0."
        raise DataError(f"{identity} has {num_samples} sample, too few to keep a part for evaluation", fix)
    return min(max(round(num_samples * fraction), 1), num_samples - 1)
