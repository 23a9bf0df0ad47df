"""Scales the learning rate to the batch size.

A pure function of the job's numbers. Linear: a step over k times the samples replaces k steps, as long as the weights
change little in those (Goyal et al. 2017). Sqrt: keeps the variance of the update, the usual choice for Adam.
Invariant: the batch that the rate was tuned for keeps its rate, by every rule.
"""

from __future__ import annotations

from math import sqrt

from closeranks.optim.config import OptimConfig
from closeranks.optim.lr_schedule import num_warmup_steps


def lr_scaling_factor(config: OptimConfig, batch: int) -> float:
    """The factor on ``lr`` for steps of ``batch`` samples."""
    if config.scaling == "none" or config.base_batch is None:
        return 1.0
    ratio = batch / config.base_batch
    return ratio if config.scaling == "linear" else sqrt(ratio)


def with_scaled_lr(config: OptimConfig, batch: int) -> OptimConfig:
    """The same settings with the scaled learning rate."""
    return config.model_copy(update={"lr": config.lr * lr_scaling_factor(config, batch)})


def describe_lr_scaling(config: OptimConfig, batch: int, num_steps: int) -> str:
    """The rule and its result, in one line; empty where nothing is scaled."""
    if config.scaling == "none":
        return ""
    factor = lr_scaling_factor(config, batch)
    warmup = num_warmup_steps(config.schedule, num_steps)
    begin = f"reached after {warmup} steps of warm-up" if warmup else "from the first step"
    sizes = f"{config.scaling} in {batch} samples a step, tuned for {config.base_batch}"
    return f"learning rate {config.lr * factor:.4g} = {config.lr:.4g} x {factor:.4g} ({sizes}), {begin}"


def lr_scaling_warning(config: OptimConfig, batch: int, num_steps: int) -> str:
    """Why a raised rate needs a warmup; empty where it does not."""
    factor = lr_scaling_factor(config, batch)
    if factor < 2 or num_warmup_steps(config.schedule, num_steps):
        return ""
    rate = f"the learning rate is {factor:.4g} times the one tuned for, from the first step"
    return f"{rate}: untrained weights rarely tolerate that. Set optim.schedule.warmup, such as 0.1."
