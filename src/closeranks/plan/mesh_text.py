"""Describes a mesh as text: the position of each rank, and what it holds.

Invariant: a mesh that fits on a screen is written out; of a larger one, the first ranks are, with the number of those
that are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from closeranks.facts.layout import Layout
from closeranks.facts.memory.memory_per_rank import StageUnits
from closeranks.facts.mesh import Mesh, MeshCoordinate
from closeranks.facts.shapes.model_structure import ModelUnit
from closeranks.plan.layout_text import ByteUnit
from closeranks.plan.layouts import LayoutCost

_MAX_SHOWN = 12
_MAX_ROWS = 48
"""Of all grids together."""


def mesh_lines(cost: LayoutCost) -> Iterator[str]:
    """A grid for each pipeline rank: data ranks downwards, tensor ranks across."""
    mesh = Mesh(cost.layout)
    _, replicas, shards, tensors = mesh.sizes
    width = max(len(str(cost.layout.num_ranks - 1)), len(f"tensor {tensors - 1}")) + 2
    max_rows = max(1, min(_MAX_SHOWN, _MAX_ROWS // len(cost.ranks)))
    for rank in cost.ranks:
        yield f"pipeline {rank.pipeline}   {'; '.join(map(stage_name, rank.stages))}"
        shown = range(min(tensors, _MAX_SHOWN))
        yield " " * 20 + "".join(f"{f'tensor {tensor}':>{width}}" for tensor in shown) + _more(tensors, "tensor ranks")
        rows = [(replica, shard) for replica in range(replicas) for shard in range(shards)]
        for replica, shard in rows[:max_rows]:
            numbers = (mesh.rank_of(MeshCoordinate(rank.pipeline, replica, shard, tensor)) for tensor in shown)
            yield f"  {_row_name(mesh, replica, shard):<18}" + "".join(f"{number:>{width}}" for number in numbers)
        if len(rows) > max_rows:
            yield f"  ... and {len(rows) - max_rows} more data ranks"


def _row_name(mesh: Mesh, replica: int, shard: int) -> str:
    _, replicas, shards, _ = mesh.sizes
    if replicas > 1 and shards > 1:
        return f"replica {replica} shard {shard}"
    return f"shard {shard}" if shards > 1 else f"data {replica}"


def _more(count: int, noun: str) -> str:
    return f"   ... of {count} {noun}" if count > _MAX_SHOWN else ""


def group_lines(layout: Layout) -> Iterator[str]:
    """The process groups of each axis."""
    mesh = Mesh(layout)
    for axis, size in zip(("pipeline", "replica", "shard", "tensor"), mesh.sizes, strict=True):
        if size > 1:
            groups = mesh.groups(axis)
            shown = "  ".join(_ranks(group) for group in groups[:_MAX_SHOWN])
            yield f"{axis:<9} {len(groups)} x {size:<4} {shown}{_more(len(groups), 'groups')}"


def _ranks(group: Sequence[int]) -> str:
    """``0-3``, ``0,4,8``; long ones as first, second, ..., last."""
    if len(group) > 2 and list(group) == list(range(group[0], group[-1] + 1)):
        return f"{group[0]}-{group[-1]}"
    shown = [str(rank) for rank in group] if len(group) <= 8 else [*map(str, group[:3]), "...", str(group[-1])]
    return ",".join(shown)


def stage_name(stage: StageUnits) -> str:
    return f"stage {stage.number}: {unit_names(stage.units)}"


def unit_names(units: Sequence[ModelUnit]) -> str:
    """``model.embed_tokens, model.layers.0..3``: numbered neighbours together."""
    runs: list[list[str]] = []
    for unit in units:
        if runs and _follows(runs[-1][-1], unit.name):
            runs[-1].append(unit.name)
        else:
            runs.append([unit.name])
    return ", ".join(_run_name(run) for run in runs)


def _run_name(run: Sequence[str]) -> str:
    if not run[0]:
        return "modules outside all units"
    return run[0] if len(run) == 1 else f"{run[0]}..{run[-1].rpartition('.')[2]}"


def _follows(before: str, name: str) -> bool:
    (parent, _, last), (own, _, number) = before.rpartition("."), name.rpartition(".")
    return parent == own and last.isdecimal() and number.isdecimal() and int(number) == int(last) + 1


def byte_lines(cost: LayoutCost, byte_unit: ByteUnit, *, knows_activations: bool) -> Iterator[str]:
    """What each pipeline rank holds, then the named parts of the fullest."""
    names = ("weights", "gradients", "optimizer", "buffers", "activations", "total")
    yield f"{byte_unit.name + ' a rank':<14}" + "".join(f"{name:>13}" for name in names)
    for rank in cost.ranks:
        state = rank.state
        held = (state.parameters, rank.gradient_bytes, state.optimizer, rank.buffer_bytes)
        kept = byte_unit.text(rank.activation_bytes) if knows_activations else "?"
        texts = (*map(byte_unit.text, held), kept, byte_unit.text(rank.total_bytes))
        yield f"pipeline {rank.pipeline:<5}" + "".join(f"{text:>13}" for text in texts)
    full = cost.fullest
    parts = (*full.buffers, *full.activations)
    if parts:
        yield f"of which on pipeline {full.pipeline}, the fullest:"
        width = max(len(part.name) for part in parts)
        yield from (f"  {part.name:<{width}}  {byte_unit.text(part.num_bytes):>8}" for part in parts)


def traffic_lines(cost: LayoutCost) -> Iterator[str]:
    """What the busiest rank sends in a step, a line per kind of collective."""
    busy = cost.busiest
    byte_unit = ByteUnit.for_largest(max((row.sent_bytes for row in busy.volumes), default=0))
    yield f"sent per step by a rank of pipeline {busy.pipeline}, the busiest ({byte_unit.name}):"
    for row in busy.volumes:
        what = f"{row.operation} of {row.what} over {row.num_ranks} {row.axis} ranks"
        yield f"  {what:<58} {row.calls:>7,} calls {byte_unit.text(row.sent_bytes):>9}"
