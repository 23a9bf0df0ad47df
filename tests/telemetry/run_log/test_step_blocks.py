"""Blocks of steps: what they hold is what was added, and a damaged line is no block."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.events import Evaluated, Resources, RunStarted, StepPhases, Warned
from closeranks.telemetry.run_log.step_blocks import (
    LEAD_STEPS,
    STEPS,
    BlockBuilder,
    StepBlock,
    append_block,
    parse_index_line,
    to_index_line,
)
from tests.telemetry.conftest import CPU, step


def built(*events: object) -> list[StepBlock]:
    """The blocks of events of 10 bytes, one a second."""
    builder, blocks = BlockBuilder(0), []
    for at, event in enumerate(events, start=1):
        blocks.append(builder.add(event, float(at), b"123456789\n"))  # type: ignore[arg-type]
    return [block for block in (*blocks, builder.finish()) if block is not None]


def test_a_block_holds_sums_and_extremes_of_its_steps_and_says_where_the_rest_is() -> None:
    (block,) = built(
        CPU,
        step(1, loss=3.0, items=10, seconds=2.0, num_bad=1),
        Warned("slow"),
        StepPhases(1, 2.0, {"forward": 1.5, "data": 0.5}),
        step(2, loss=math.nan, taken=False, items=30, seconds=1.0, memory_bytes=7 << 30),
        Resources(gpu={"energy_j": 5.0}),
        Resources(gpu={"energy_j": 6.0}),
        step(3, loss=1.0, items=20, seconds=1.0, grad_norm=math.inf),
        StepPhases(2, 1.0, {"forward": 1.0}),
        Evaluated(2),
        None,
    )
    assert (block.begin, block.end, block.at, block.start) == (0, 110, 11.0, 0)
    assert (block.first, block.last, block.num, block.num_skipped, block.num_bad) == (1, 3, 3, 1, 1)
    assert (block.items, block.seconds, block.skipped_items, block.skipped_s) == (60, 4.0, 30, 1.0)
    assert block.memory_bytes == 7 << 30
    assert block.loss == {"low": 1.0, "mean": 2.0, "high": 3.0}
    assert block.grad_norm == {"low": 1.0, "mean": 1.0, "high": 1.0}
    assert block.rate == {"low": 5.0, "mean": pytest.approx(55 / 3), "high": 30.0}
    assert (block.num_phases, block.phases_s, block.phases) == (2, 3.0, {"forward": 2.5, "data": 0.5})
    assert block.energy_j == 11.0
    assert (block.others, block.warnings, block.samples) == ([0, 10, 90, 110], [20, 30], [50, 70])
    assert block.mean_phases() == StepPhases(2, 1.5, {"forward": 1.25, "data": 0.25})


def test_blocks_end_with_the_same_steps_whenever_a_session_begins() -> None:
    events = [*(step(number) for number in range(1, 301)), replace(CPU, first_step=290)]
    blocks = built(CPU, *events, *(step(number) for number in range(291, 600)))
    assert [(block.first, block.last) for block in blocks] == [
        (1, LEAD_STEPS),
        (LEAD_STEPS + 1, STEPS),
        (STEPS + 1, 300),
        (291, 290 + LEAD_STEPS),
        (291 + LEAD_STEPS, 2 * STEPS),
        (2 * STEPS + 1, 599),
    ]
    assert [block.start for block in blocks] == [0, None, None, 290, None, None]
    assert all(block.end == later.begin for block, later in pairwise(blocks))


finite = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(finite, finite, finite, st.booleans()), min_size=1, max_size=20))
def test_whatever_the_values_are_a_line_comes_back_as_its_block(rows: list[tuple[float, float, float, bool]]) -> None:
    steps = [
        step(number, loss=loss, grad_norm=norm, seconds=seconds, taken=taken)
        for number, (loss, norm, seconds, taken) in enumerate(rows, start=1)
    ]
    phases = [StepPhases(number, seconds, {"forward": loss}) for number, (loss, _, seconds, _) in enumerate(rows)]
    for block in built(RunStarted(), *steps, *phases):
        assert parse_index_line(to_index_line(block)) == block


def test_a_line_that_is_damaged_anywhere_is_no_block() -> None:
    (block,) = built(CPU, *(step(number) for number in range(1, 9)))
    line, rng = to_index_line(block), random.Random(0)
    assert parse_index_line(line) == block
    for place in range(len(line) - 1):
        assert parse_index_line(line[:place]) is None or line[place:] == b"}\n"
        damaged = bytearray(line)
        damaged[place] ^= 1 << rng.randrange(8)
        assert parse_index_line(bytes(damaged)) in (None, block)  # a 0 before the checksum changes nothing


@pytest.mark.parametrize(
    "changes",
    [
        {"end": 0},
        {"begin": -1},
        {"tail_bytes": 0},
        {"tail_bytes": 1000},
        {"first": 9},
        {"others": [5]},
        {"others": [20, 10]},
        {"warnings": [0, 1000]},
        {"loss": {"low": 1.0}},
        {"seconds": "1"},
        {"num": 2**70},
        {"phases": {"forward": None}},
    ],
)
def test_a_block_that_no_version_writes_is_none(changes: dict[str, object]) -> None:
    (block,) = built(CPU, *(step(number) for number in range(1, 9)))
    assert parse_index_line(to_index_line(replace(block, **changes))) is None  # type: ignore[arg-type]


def test_a_block_takes_the_place_of_those_it_does_again() -> None:
    blocks: list[StepBlock] = []
    for begin, first, last in ((0, 1, 16), (10, 17, 32), (20, 33, 40), (30, 17, 32)):
        append_block(blocks, StepBlock(begin, begin + 10, first=first, last=last, num=last - first + 1))
    assert [block.begin for block in blocks] == [0, 30]
