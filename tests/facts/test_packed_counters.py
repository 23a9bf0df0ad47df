"""Counters packed into float64, against plain counting."""

from __future__ import annotations

import random

import pytest
import torch

from closeranks.facts.packed_counters import PackedCounters


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 1000, 100_000])
def test_counters_of_all_ranks_add_up_exactly(num_ranks: int) -> None:
    names = [f"layer.{number}" for number in range(211)]
    counters, draw = PackedCounters(names, num_ranks), random.Random(num_ranks)
    used = {name: draw.choice([0, 0, 1, num_ranks]) for name in names}
    once, often = ([name for name in names if used[name] == count] for count in (1, num_ranks))
    total = torch.tensor(counters.encode(once), dtype=torch.float64)
    if num_ranks > 1:
        total += num_ranks * torch.tensor(counters.encode(often), dtype=torch.float64)
    assert counters.zero_names(total.tolist(), names) == {name for name in names if not used[name]}
    assert counters.size < len(names)
