"""Positions of a run that was continued after short steps."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from closeranks.data.sampling.cursor import Cursor, ends_at, position_after, steps_to
from closeranks.data.sampling.order import BatchSchedule


def test_a_short_step_stays_short_and_full_ones_follow() -> None:
    ends = ends_at(Cursor(141, 4500), 32)
    assert ends == (Cursor(141, 4500),)
    schedule = BatchSchedule.for_epochs(1500, 32, 4, 6, ends)
    assert [schedule.position(step) for step in (139, 140, 141, 142, 281, 282)] == [4448, 4480, 4500, 4532, 8980, 9000]
    assert schedule.num_steps == 282
    assert BatchSchedule.for_steps(1500, 32, 4, 200, ends).position(200) == 4500 + 59 * 32


def test_a_step_that_was_full_leaves_no_trace() -> None:
    assert ends_at(Cursor(10, 320), 32) == ()
    assert ends_at(Cursor(143, 4564), 32, [Cursor(141, 4500)]) == (Cursor(141, 4500),)
    # a state from before the end of a part that is known from elsewhere
    assert ends_at(Cursor(100, 3200), 32, [Cursor(141, 4500)]) == ()


def test_asking_again_for_what_is_done_leaves_nothing_to_do() -> None:
    ends = (Cursor(4, 27),)
    for epochs in (0.5, 1):
        schedule = BatchSchedule.for_epochs(27, 8, 4, epochs, ends)
        assert schedule.num_steps <= 4
        assert schedule.position(4) == 27


@given(
    num_samples=st.integers(1, 40),
    global_batch=st.integers(1, 12),
    micro_batch=st.integers(1, 5),
    parts=st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=1, max_size=4),
)
def test_every_sample_is_taken_once_an_epoch_however_often_a_run_is_continued(
    num_samples: int, global_batch: int, micro_batch: int, parts: list[tuple[bool, int]]
) -> None:
    cursor, ends, taken = Cursor(0, 0), (), np.empty(0, np.int64)
    for is_by_steps, more in parts:
        if is_by_steps:
            schedule = BatchSchedule.for_steps(num_samples, global_batch, micro_batch, cursor.step + more, ends)
        else:
            epochs = (cursor.position + more * num_samples) / num_samples
            schedule = BatchSchedule.for_epochs(num_samples, global_batch, micro_batch, epochs, ends)
        for step in range(cursor.step, schedule.num_steps):
            batches = schedule.micro_batches(step)
            assert sum(one.num_samples for one in batches) == schedule.position(step + 1) - schedule.position(step)
            taken = np.concatenate([taken, *(one.indices(num_samples, 7) for one in batches)])
        cursor = Cursor(schedule.num_steps, schedule.position(schedule.num_steps))
        ends = ends_at(cursor, global_batch, schedule.ends)
        assert position_after(cursor.step, global_batch, ends) == cursor.position
        assert steps_to(cursor.position, global_batch, ends) == cursor.step
    assert len(taken) == cursor.position
    for first in range(0, len(taken) - num_samples + 1, num_samples):
        assert sorted(taken[first : first + num_samples]) == list(range(num_samples))


def test_it_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, closeranks.run.job.batch_history; assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
