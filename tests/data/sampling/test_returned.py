"""Whose micro-batches are returned, and who takes them: each exactly once, whoever is late."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from closeranks.data.sampling.order import BatchSchedule
from closeranks.data.sampling.returned import ReturnedMicroBatches


@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(5, 60),
    st.lists(st.sets(st.integers(0, 5)), min_size=8, max_size=8),
)
def test_every_micro_batch_is_taken_once_before_its_epoch_ends(
    num_workers: int, global_batch: int, num_samples: int, late: list[set[int]]
) -> None:
    schedule = BatchSchedule.for_steps(num_samples, global_batch, 2, len(late))
    returned, taken = ReturnedMicroBatches(schedule, num_workers), Counter[tuple[int, int]]()
    for step, left_out in enumerate(late):
        busy = returned.busy(step)
        counted = busy if returned.must_take_all(step) else [worker for worker in busy if worker not in left_out]
        for worker in counted:
            own = schedule.assigned(step, worker, num_workers)
            both = (*returned.assigned(step, worker), *own)
            assert returned.num_samples(step, worker) == sum(one.num_samples for one in both)
            taken.update((one.step, one.index) for one in both)
        returned.settle(step, counted)
        if step == len(late) // 2:  # a restart, on another number of workers
            state, num_workers = returned.state(), num_workers % 6 + 1
            returned = ReturnedMicroBatches(schedule, num_workers)
            returned.load(state)
        if returned.must_take_all(step):
            assert not returned.waiting
            so_far = {(one.step, one.index) for past in range(step + 1) for one in schedule.micro_batches(past)}
            assert taken == Counter(so_far)


def test_they_go_to_those_with_the_least_to_do_and_last_to_the_late() -> None:
    returned = ReturnedMicroBatches(BatchSchedule.for_steps(1000, 7, 1, 9), 3)
    assert [len(returned.assigned(0, worker)) for worker in range(3)] == [0, 0, 0]
    returned.settle(0, [0, 1])
    assert [one.index for one in returned.waiting] == [5, 6]
    shares = [[(one.step, one.index) for one in returned.assigned(1, worker)] for worker in range(3)]
    assert shares == [[], [(0, 5)], [(0, 6)]], "worker 0 has three of its own, the others two; 2 was late"
    returned.settle(1, [0, 1, 2])
    assert not returned.waiting
