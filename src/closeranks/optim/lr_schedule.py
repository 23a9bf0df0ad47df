"""Learning-rate schedules: the factor on the learning rate at each step.

A pure function of the step and the number of steps. Invariant: it rises to 1 during the warmup and never rises after;
it would reach ``min_ratio`` at step ``num_steps``, one after the last, so that the last step still learns.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from closeranks.core.registry import Registry
from closeranks.optim.config import ScheduleConfig

Shape = Callable[[ScheduleConfig, int, int, int], float]
"""(config, step, first step after the warmup, number of steps) -> factor, for steps after the warmup."""

SHAPES: Registry[Shape] = Registry("learning rate schedule")


def lr_factor(config: ScheduleConfig, step: int, num_steps: int) -> float:
    """The factor on ``lr`` for the step with this index, the first being 0."""
    warmup = num_warmup_steps(config, num_steps)
    if step < warmup:
        return (step + 1) / warmup
    return SHAPES[config.name](config, step, warmup, num_steps)


def num_warmup_steps(config: ScheduleConfig, num_steps: int) -> int:
    """Whole steps of warmup, at most all of them."""
    wanted = round(config.warmup * num_steps) if config.warmup < 1 else int(config.warmup)
    return min(wanted, num_steps)


def _progress(step: int, first: int, last: int) -> float:
    """0 at ``first``, 1 at ``last`` and beyond."""
    return 1.0 if step >= last else max(0.0, (step - first) / (last - first))


@SHAPES.register("constant")
def _constant(config: ScheduleConfig, step: int, warmup: int, num_steps: int) -> float:
    return 1.0


@SHAPES.register("linear")
def _linear(config: ScheduleConfig, step: int, warmup: int, num_steps: int) -> float:
    return 1.0 - (1.0 - config.min_ratio) * _progress(step, warmup, num_steps)


@SHAPES.register("cosine")
def _cosine(config: ScheduleConfig, step: int, warmup: int, num_steps: int) -> float:
    height = (1.0 + math.cos(math.pi * _progress(step, warmup, num_steps))) / 2.0
    return config.min_ratio + (1.0 - config.min_ratio) * height


@SHAPES.register("wsd")
def _wsd(config: ScheduleConfig, step: int, warmup: int, num_steps: int) -> float:
    """Warmup, stable, decay: a linear decay over the last steps, which begins after the warmup at the earliest."""
    first = max(warmup, num_steps - round(config.decay * num_steps))
    return 1.0 if step < first else 1.0 - (1.0 - config.min_ratio) * _progress(step, first, num_steps)
