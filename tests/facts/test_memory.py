"""Bytes of a model's state under ZeRO."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from closeranks.facts.memory import state_bytes


@given(st.integers(1, 10**9), st.integers(1, 64))
def test_each_stage_splits_one_more_part_and_loses_nothing(num_params: int, shard: int) -> None:
    stages = [state_bytes(num_params, zero=zero, shard=shard) for zero in range(4)]
    assert stages[0].total == 16 * num_params
    assert all(later.total <= earlier.total for earlier, later in pairwise(stages))
    assert stages[3].total * shard >= stages[0].total
    assert (stages[1].params, stages[1].gradients) == (stages[0].params, stages[0].gradients)
    assert stages[2].optimizer == stages[1].optimizer == stages[3].optimizer
