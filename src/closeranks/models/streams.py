"""Which random numbers does each unit of a model draw?

A unit's stream is keyed by the micro-batch's seed and the unit's number, so a pipeline stage that runs only some units
draws what a single process draws in them. Invariant: leaving a unit puts the micro-batch's own seed back, so every unit
finds the same one, whatever ran before it in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from closeranks.core.keys import derive_seed


@contextmanager
def unit_stream(number: int) -> Iterator[None]:
    """Key the streams of the CPU and of the current device for unit ``number``. Costs some microseconds, no sync."""
    base = torch.default_generator.initial_seed()
    enter_unit(base, number)
    try:
        yield
    finally:
        _key(base)


def enter_unit(base: int, number: int) -> None:
    """Key the streams for unit ``number`` of the micro-batch whose seed is ``base``."""
    _key(derive_seed(base, "unit", number))


def _key(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
