"""Which choices does a search try? Layouts that a cluster allows, with micro-batch, recompute and schedule.

What is left out is left out by a rule that holds for every model, and ``docs/plan.md`` lists the rules: the tensor axis
stays inside a host, a pipeline has no more stages than the model has layers, and schedules that are never better than
another one (gpipe, looped-bfs) are not tried. Invariant: every choice is legal and uses exactly the devices asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from closeranks.facts.layout import SCHEDULES, Layout, LayoutConstraints, divisors, legal_problems
from closeranks.plan.step_time.workload import PlanChoice, Precision, Recompute

SEARCHED_SCHEDULES = ("1f1b", "interleaved-1f1b", "zbv")
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The values that a search tries, besides the axes."""

    micro_batches: tuple[int, ...] = _MICRO_BATCHES
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    precisions: tuple[Precision, ...] = ("bf16",)
    compiled: tuple[bool, ...] = (True,)
    schedules: tuple[str, ...] = SEARCHED_SCHEDULES
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    layout: Layout | None = None
    """If given, the only layout that is tried."""


def candidate_choices(
    space: SearchSpace, constraints: LayoutConstraints, template: PlanChoice, num_devices: int, per_host: int
) -> Iterator[PlanChoice]:
    """Every choice of ``space`` on so many devices; ``template`` gives what the space does not vary."""
    for micro_batch in space.micro_batches:
        if micro_batch > constraints.global_batch:
            continue
        needs = replace(constraints, micro_batch=micro_batch)
        for layout in candidate_layouts_in(space, needs, num_devices, per_host):
            for recompute, precision, compiled in product(space.recompute, space.precisions, space.compiled):
                yield replace(
                    template, layout=layout, micro_batch=micro_batch, recompute=recompute, precision=precision,
                    compiled=compiled,
                )  # fmt: skip


def candidate_layouts_in(
    space: SearchSpace, constraints: LayoutConstraints, num_devices: int, per_host: int
) -> Iterator[Layout]:
    if space.layout is not None:
        if space.layout.num_ranks == num_devices and not legal_problems(space.layout, constraints):
            yield space.layout
        return
    for tensor in divisors(num_devices, per_host):
        if per_host % tensor and num_devices > per_host:
            continue  # a group of the tensor axis would cross hosts
        for pipeline in divisors(num_devices // tensor, max(constraints.num_layers, 1)):
            data = num_devices // tensor // pipeline
            if data > constraints.num_micro:
                continue
            for schedule in space.schedules if pipeline > 1 else space.schedules[:1]:
                plain = Layout(data, tensor=tensor, pipeline=pipeline, schedule=schedule if pipeline > 1 else "1f1b")
                if not legal_problems(plain, constraints):
                    yield from _with_zero(plain, space.zero_stages, per_host // tensor)


def _with_zero(plain: Layout, stages: Sequence[int], ranks_inside: int) -> Iterator[Layout]:
    """Each ZeRO stage that has an effect; weights are also sharded over one host, or over 8 or 64 of them."""
    for zero in stages if plain.data > 1 else (0,):
        yield replace(plain, zero=zero)
        if zero == 3:
            sizes = (ranks_inside * hosts for hosts in (1, 8, 64))
            yield from (
                replace(plain, zero=3, shard=size) for size in sizes if 1 < size < plain.data and plain.data % size == 0
            )


def complexity(choice: PlanChoice) -> int:
    """How many moving parts a choice has: what a team must understand, and what may go wrong.

    A pipeline counts three, tensor two, ZeRO-1 one and ZeRO-2 and 3 two; one more each for a schedule other than 1f1b,
    for shards over fewer than all data ranks, for recompute, and for compilation.
    """
    layout = choice.layout
    return (
        3 * (layout.pipeline > 1)
        + 2 * (layout.tensor > 1)
        + 2 * (layout.context > 1)
        + 2 * (layout.expert > 1)
        + min(layout.zero, 2)
        + (layout.pipeline > 1 and layout.schedule != "1f1b")
        + bool(layout.shard)
        + (choice.recompute != "none")
        + choice.compiled
        + 2 * choice.offload
    )


def planned_only(choice: PlanChoice) -> tuple[str, ...]:
    """What of a choice this version models and does not train, so that no job file may hold it."""
    found = []
    if choice.layout.context > 1:
        found.append(f"context={choice.layout.context}")
    if choice.layout.expert > 1:
        found.append(f"expert={choice.layout.expert}")
    if choice.offload:
        found.append("offload")
    if choice.precision == "fp8":
        found.append("fp8")
    if choice.virtual_stages not in (0, SCHEDULES.get(choice.layout.schedule, 1)):
        found.append(f"{choice.virtual_stages} virtual stages")
    return tuple(found)
