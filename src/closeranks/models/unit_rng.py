"""A random stream for each unit of a model.

A unit's stream is seeded with the micro-batch's seed and the unit's number, so a pipeline stage that runs only some
units draws in them what a single process draws. Invariant: leaving a unit restores the micro-batch's own seed, so every
unit starts from the same one, whatever ran before it in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from closeranks.core.seeds import derive_seed


@contextmanager
def unit_rng(number: int) -> Iterator[None]:
    """Seed the CPU's and the current device's generators for unit ``number``. Costs some microseconds, no sync."""
    base = torch.default_generator.initial_seed()
    seed_unit(base, number)
    try:
        yield
    finally:
        _key(base)


def seed_unit(base: int, number: int) -> None:
    """Seed the generators for unit ``number`` of the micro-batch whose seed is ``base``."""
    _key(derive_seed(base, "unit", number))


def _key(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
