"""In which order do transforms turn a plain module into a distributed one? The one place where the order stands.

    1. materialise    weights first, from their names, so that no later transform can change them
    2. batch norm     replaces modules, so it comes before anything that captures them
    3. compile        per block: one graph serves all equal blocks, and start-up does not grow with depth; after every
                      transform that changes a block's forward, before anything that hooks its parameters
    (then, in ``run``: freeze, reducer, optimizer: they take hold of the final parameters)

Invariant: names and values of parameters after ``apply`` are those the spec built, whatever was applied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from closeranks.core.protocols import ModelSpec
from closeranks.parallel.batchnorm import BatchStatistics, advice, synchronise
from closeranks.parallel.config import LayoutConfig
from closeranks.parallel.group import Group
from closeranks.parallel.materialise import materialise
from closeranks.parallel.precision import Precision


@dataclass(frozen=True, slots=True)
class Applied:
    """The distributed module, its batch statistics, and what a person should know about it."""

    module: nn.Module
    statistics: BatchStatistics
    warnings: tuple[str, ...]


def apply(
    spec: ModelSpec,
    *,
    layout: LayoutConfig,
    group: Group,
    device: torch.device,
    precision: Precision,
    seed: int,
    micro_batch: int,
    compiled: bool,
) -> Applied:
    module = materialise(spec, seed=seed, device=device, dtype=precision.weights, broadcast=group.broadcast)
    hint = advice(module, layout.batch_norm, micro_batch, group.size)
    if layout.batch_norm == "sync" and group.size > 1:
        synchronise(module, group.process_group)
    statistics = BatchStatistics(module, group)
    if compiled:
        for name in spec.compile_units:
            module.get_submodule(name).compile()
    return Applied(module, statistics, (hint,) if hint else ())
