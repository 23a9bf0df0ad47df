"""Formats the costs of layouts as table cells and sentences.

Pure: costs in, cells and sentences out; ``cli`` prints them. Invariant: all bytes of a listing have one unit, so that
columns can be compared at a glance, and every column has a sentence that says what it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from closeranks.facts.layout import Layout
from closeranks.facts.memory.state_bytes import NamedBytes
from closeranks.plan.layouts import LayoutCost, LayoutSearch, RankCost

DATA_AXES = ("data", "shard", "replica")
COLUMNS = ("layout", "weights", "grads", "optim", "buffers", "activ.", "total", "bubble", "data", "tensor", "pipe")
BRIEF = ("layout", "state", "buffers", "activ.", "total", "bubble", "sent")
"""For a narrow terminal: weights, gradients and optimizer state together, and all axes together."""
NARROW = 112
"""Characters per line that the full table needs."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class ByteUnit:
    """A unit for bytes."""

    name: str
    size: int

    @classmethod
    def for_largest(cls, largest: int) -> ByteUnit:
        """The largest unit in which the largest number is still ten or more."""
        power = 0
        while power + 1 < len(_UNITS) and largest >= 10 * 1024 ** (power + 1):
            power += 1
        return cls(_UNITS[power], 1024**power)

    def text(self, num_bytes: int) -> str:
        """Three digits; a dash for zero, an upper bound for what would round to zero."""
        if num_bytes == 0:
            return "-"
        value = num_bytes / self.size
        if value < 0.005 and self.size > 1:
            return "<.01"
        return f"{value:,.0f}" if value >= 100 or self.size == 1 else f"{value:.{1 if value >= 10 else 2}f}"


def byte_unit_for(costs: Sequence[LayoutCost]) -> ByteUnit:
    return ByteUnit.for_largest(max((cost.fullest.total_bytes for cost in costs), default=0))


def canonical_layout(layout: Layout) -> Layout:
    """The same layout without settings that have no effect, so that equivalent layouts compare equal."""
    zero = layout.zero if layout.data > 1 else 0
    shard = layout.shard if zero and layout.shard != layout.data else 0
    return replace(layout, zero=zero, shard=shard, schedule=layout.schedule if layout.pipeline > 1 else "1f1b")


def table_row(cost: LayoutCost, byte_unit: ByteUnit, *, knows_activations: bool) -> tuple[str, ...]:
    """One row, in the order of ``COLUMNS``."""
    full, busy = cost.fullest, cost.busiest
    state = full.state
    kept = byte_unit.text(full.activation_bytes) if knows_activations else _UNKNOWN
    held = [*map(byte_unit.text, (state.parameters, full.gradient_bytes, state.optimizer, full.buffer_bytes)), kept]
    sent = [byte_unit.text(busy.sent_on(*axes)) for axes in (DATA_AXES, ("tensor",), ("pipeline",))]
    bubble = f"{100 * cost.occupancy.bubble:.1f}%" if cost.layout.pipeline > 1 else "-"
    return str(cost.layout), *held, byte_unit.text(full.total_bytes), bubble, *sent


def brief_table_row(cost: LayoutCost, byte_unit: ByteUnit, *, knows_activations: bool) -> tuple[str, ...]:
    """One row, in the order of ``BRIEF``."""
    name, *_, buffers, kept, total, bubble, _, _, _ = table_row(cost, byte_unit, knows_activations=knows_activations)
    state = cost.fullest.state
    held = byte_unit.text(state.parameters + state.gradients + state.optimizer)
    return name, held, buffers, kept, total, bubble, byte_unit.text(cost.busiest.sent_bytes)


def refused_text(found: LayoutSearch) -> str:
    """``36 more are not legal: 24 by tensor (16 does not divide the model's 8 key-value heads), 12 by ...``"""
    if not found.refused:
        return "None was refused."
    count = found.num_refused
    why = "; ".join(f"{entry.count} by {entry.axis} ({entry.example.what})" for entry in found.refused)
    more = " more" if found.legal else ""
    return f"{count}{more} {'is' if count == 1 else 'are'} not legal for this model and batch: {why}."


WORKERS = (*range(1, 9), 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Numbers of workers that are tried to find the fewest on which a layout fits."""


def does_not_fit_text(costs: Sequence[LayoutCost], fits_gib: float) -> str:
    """``None of these 12 layouts fits into 80 GiB a rank: tensor=8 needs the least, 246 GiB, which is 166 GiB ...``"""
    least = min(costs, key=lambda cost: cost.fullest.total_bytes)
    needs = least.fullest.total_bytes / (1 << 30)
    these = f"None of these {len(costs)} layouts fits" if len(costs) > 1 else "This layout does not fit"
    return (
        f"{these} into {fits_gib:g} GiB a rank: {least.layout} needs the least, {needs:,.1f} GiB, which is "
        f"{needs - fits_gib:,.1f} GiB too much."
    )


def fewest_workers_text(fewest: LayoutCost | None, fits_gib: float, command: str) -> str:
    """The fewest workers on which a layout fits; ``command`` lists layouts, but for the number of workers."""
    if fewest is None:
        what = (
            f"No number of workers up to {WORKERS[-1]:,} was found on which a layout fits into {fits_gib:g} GiB a rank"
        )
        return f'{what}. Try a smaller train.micro_batch, or train.recompute = "full".'
    number = fewest.layout.num_ranks
    workers = f"{number} worker{'' if number == 1 else 's'}"
    return f"The fewest that fit are {workers}, with {fewest.layout}: {command} -n {number} --fits {fits_gib:g}"


def legend(*, knows_activations: bool, is_brief: bool = False) -> str:
    """What the columns count."""
    estimate = (
        "activ. estimates what the micro-batches in flight keep for backward (eager, fused attention; an allocator "
        "needs 10 to 25% on top)"
        if knows_activations
        else "activ. is not known for this model, so total is state alone"
    )
    return (
        "Held by the fullest rank at the peak of a step: weights, gradients, optimizer state; buffers are gathered "
        f"weights and gradients in flight; {estimate}. bubble is the share of time that pipeline ranks wait for each "
        f"other, stages taken as equal. {_TRAFFIC[is_brief]}"
    )


_TRAFFIC = (
    "data, tensor and pipe are sent per step by the busiest rank, in rings.",
    "sent is what the busiest rank sends per step on all axes, in rings; state is weights, gradients and optimizer "
    "state together. A wider terminal shows them apart.",
)


def as_json(cost: LayoutCost, *, is_job: bool) -> dict[str, Any]:
    """Everything about one layout, for machines; bytes and calls as whole numbers."""
    return {
        "layout": str(cost.layout),
        "is_job": is_job,
        "num_micro": cost.num_micro,
        "bubble": cost.occupancy.bubble,
        "fullest": _rank_as_json(cost.fullest),
        "busiest": _rank_as_json(cost.busiest),
    }


def ranks_as_json(cost: LayoutCost) -> list[dict[str, Any]]:
    return [
        {**_rank_as_json(rank), "stages": {stage.number: [unit.name for unit in stage.units] for stage in rank.stages}}
        for rank in cost.ranks
    ]


def _rank_as_json(rank: RankCost) -> dict[str, Any]:
    state = rank.state
    return {
        "pipeline": rank.pipeline,
        "weights_bytes": state.parameters,
        "gradients_bytes": rank.gradient_bytes,
        "optimizer_bytes": state.optimizer,
        "buffers": _parts_as_json(rank.buffers),
        "activations": _parts_as_json(rank.activations),
        "total_bytes": rank.total_bytes,
        "traffic": [
            {
                "axis": row.axis,
                "what": row.what,
                "operation": row.operation,
                "num_ranks": row.num_ranks,
                "calls": row.calls,
                "payload_bytes": row.payload_bytes,
                "sent_bytes": row.sent_bytes,
            }
            for row in rank.volumes
        ],
    }


def _parts_as_json(parts: Sequence[NamedBytes]) -> list[dict[str, Any]]:
    return [{"name": part.name, "bytes": part.num_bytes} for part in parts]
