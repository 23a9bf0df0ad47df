"""What a rank sends is counted by name, and taken once."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from closeranks.core.traffic import count_collective, count_sent, ring_sent_bytes, take_sent


@dataclass(frozen=True)
class Sized:
    nbytes: int


def test_counts_are_by_name_and_taken_once() -> None:
    take_sent()
    count_collective("data", "all-reduce", 4, Sized(1000))
    count_collective("data", "all-reduce", 4, Sized(200))
    count_collective("tensor", "all-gather", 2, Sized(64))
    count_sent("pipeline.send", len(array("d", [0.0] * 3)) * 8)
    taken = take_sent()
    assert taken.num_bytes == {"data.all_reduce": 1500 + 300, "tensor.all_gather": 32, "pipeline.send": 24}
    assert taken.calls == {"data.all_reduce": 2, "tensor.all_gather": 1, "pipeline.send": 1}
    assert take_sent().num_bytes == {}


def test_a_ring_sends_all_but_the_own_share_and_a_sum_twice() -> None:
    assert ring_sent_bytes("reduce-scatter", 8, 800) == ring_sent_bytes("all-gather", 8, 800) == 700
    assert ring_sent_bytes("all-reduce", 8, 800) == 1400
    assert ring_sent_bytes("all-reduce", 1, 800) == 0
