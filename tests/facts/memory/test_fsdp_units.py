"""Rows of ZeRO-3, and what travels together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from closeranks.facts.memory.fsdp_units import fsdp_units, shard_numel
from closeranks.facts.shapes.model_structure import ParameterInfo, model_structure


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 12), st.sampled_from([None, 0, 1]), st.integers(1, 3))
def test_rows_are_cut_as_torch_chunks_them(rows: int, columns: int, shard: int, dim: int | None, tensor: int) -> None:
    weight = ParameterInfo("w", (rows * tensor, columns * tensor), dim)
    kept = [shard_numel(weight, tensor, shard, index) for index in range(shard)]
    assert sum(kept) == weight.numel(tensor)
    assert kept == sorted(kept, reverse=True)
    local_rows = weight.rows(tensor)
    assert kept[0] == -(-local_rows // shard) * (weight.numel(tensor) // local_rows)


def test_without_blocks_whatever_is_large_is_gathered_alone() -> None:
    shapes = {"large.weight": (60, 10), "tied.weight": (30, 10), "small.weight": (4,), "loose": (3,)}
    found = model_structure(shapes, units=("large", "tied", "small", "head"), ties={"head.weight": "tied.weight"})
    units = fsdp_units([found.units], tensor=1, num_shards=2)
    assert [(unit.padded_numel, unit.is_freed) for unit in units] == [(600, False), (300 + 4 + 4, False)]


def test_a_block_without_weights_is_not_gathered() -> None:
    """An activation in a sequence of layers; the last layer with weights is the one that stays gathered."""
    found = model_structure({"0.weight": (4, 2), "2.weight": (6, 2)}, units=("0", "1", "2", "3"), blocks="0123")
    units = fsdp_units([found.units], tensor=1, num_shards=2)
    assert [(unit.padded_numel, unit.is_freed) for unit in units] == [(8, True), (12, False)]
