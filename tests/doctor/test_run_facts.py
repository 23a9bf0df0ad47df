"""Facts of a run: what counts, what is exposed, and what is caused by uneven ranks."""

from __future__ import annotations

import pytest

from closeranks.core.events import RunStarted, StepDone, StepPhases
from closeranks.doctor.run_facts import collect_facts, is_waiting
from tests.doctor.made import BASE, facts


def test_only_steps_that_all_ranks_recorded_and_that_are_not_first_count() -> None:
    times = {0: {step: StepPhases(step, 1.0, {"forward": 1.0}) for step in (1, 2, 3, 4)}}
    times[1] = {step: StepPhases(step, 1.0, {"forward": 1.0}) for step in (1, 2, 3)}
    found = collect_facts({}, [StepDone(step=step) for step in (1, 2, 3, 4)], times, first_steps={1})
    assert [one.step for one in found.times[0]] == [one.step for one in found.times[1]] == [2, 3]
    assert [one.step for one in found.steps] == [2, 3]


def test_the_last_step_of_the_job_waits_for_the_final_save_and_does_not_count() -> None:
    rows = [{}] * 19 + [{"save": 9.0}]
    assert facts(rows, started={"last_step": 21}).mean_s("save") == 0.0
    assert facts(rows, started={"last_step": 90}).mean_s("save") == pytest.approx(9.0 / 20)


def test_a_run_without_records_has_no_facts() -> None:
    found = collect_facts({}, [], {})
    assert (found.num_steps, found.step_s, found.uneven_s, dict(found.exposed_s)) == (0, 0.0, 0.0, {})


def test_the_least_waiting_of_any_rank_is_exposed_and_the_rest_is_uneven() -> None:
    found = facts({"data.all_reduce": 0.01, "forward": 0.05}, {"data.all_reduce": 0.03})
    assert found.exposed_s["data.all_reduce"] == pytest.approx(0.01)
    assert found.uneven_s == pytest.approx(0.01)  # half of the difference of 0.02 in forward


@pytest.mark.parametrize(
    ("phase", "waiting"), [("data.all_reduce", True), ("vote", True), ("forward", False), ("data", False)]
)
def test_waiting_for_others_is_not_own_work(phase: str, waiting: bool) -> None:
    assert is_waiting(phase) is waiting
    found = facts({phase: 0.5})
    own = sum(spent for name, spent in BASE.items() if name not in ("vote", phase)) + (0.0 if waiting else 0.5)
    assert found.own_by_rank[0] == pytest.approx(own)


def test_micro_batches_of_a_data_rank() -> None:
    assert facts({}, {}).num_micro == 4  # 32 samples in micro-batches of 4 over two ranks
    assert facts({}, {}, started={"layout": "tensor=2"}).num_micro == 8
    assert collect_facts({}, [], {}, events=[RunStarted()]).num_micro == 0


def test_a_setting_is_found_by_its_dotted_key() -> None:
    found = facts(settings={"train": {"compile": False}})
    assert found.setting("train.compile") is False
    assert found.setting("train.compile.mode") is None
    assert found.setting("optim.lr") is None
