"""The account of a run says where its time went: compared with runs on a simulated clock, which know."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.events import StepDone, StepPhases, encode
from closeranks.telemetry.goodput import run_account
from closeranks.telemetry.goodput.rank_record import record_of
from closeranks.telemetry.goodput.run_account import build_account, load_account, read_rank
from closeranks.telemetry.goodput.time_account import ROW_WORDS, UNACCOUNTED, TimeAccount
from closeranks.telemetry.run_log import step_reader
from closeranks.telemetry.run_log.recorder import AGENT, to_line
from closeranks.telemetry.run_log.step_reader import RankLog
from tests.telemetry.goodput.simulated import SimulatedRun
from tests.telemetry.run_log.long_run import small_blocks


def assert_true(run: SimulatedRun, tolerance: float = 1e-6) -> TimeAccount:
    account, truth = run.account(), run.truth()
    assert account.worker_s == pytest.approx(sum(truth.values()), rel=1e-9)
    for name in ROW_WORDS:
        assert account.rows[name] == pytest.approx(truth.get(name, 0.0), abs=tolerance * account.worker_s), name
    assert sum(account.rows.values()) == pytest.approx(account.worker_s)
    return account


def test_every_second_of_a_calm_run_is_named() -> None:
    run = SimulatedRun()
    run.launch()
    run.steps(20)
    run.end()
    account = assert_true(run)
    assert (account.num_steps, account.num_items, account.num_samples) == (20, 2000, 160)
    assert (account.num_launches, account.num_faults, account.num_redone) == (1, 0, 0)
    assert account.wall_s == pytest.approx(run.now - 1000)


def test_three_faults_and_a_later_command() -> None:
    run = SimulatedRun(num_ranks=3)
    run.launch()
    run.steps(10)
    run.fault(back_to=8)
    run.steps(5)
    run.fault(detected_s=0.0)
    run.steps(4)
    run.fault(detected_s=2.0, back_to=15)
    run.steps(5)
    run.end()
    run.pause(3600.0)
    run.launch(first_step=12)
    run.steps(10)
    run.end()
    account = assert_true(run)
    assert account.num_steps == 22
    assert account.num_redone == 2 + 0 + 2 + 8
    assert (account.num_launches, account.num_faults) == (2, 3)
    assert account.wall_s < 60


def test_a_fault_while_the_run_recovers() -> None:
    run = SimulatedRun()
    run.launch()
    run.steps(6)
    run.fault()
    run.fault_in_recovery()
    run.steps(6)
    run.end()
    account = assert_true(run)
    assert account.num_faults == 2
    assert account.rows["recovery"] == pytest.approx(2 * (0.04 + 0.7 + 0.05 + 0.7 + 0.05))


def test_without_an_agent_a_command_lasts_from_its_process_to_its_last_event() -> None:
    run = SimulatedRun(has_launch_events=False)
    run.launch()
    run.steps(5)
    run.end()
    assert_true(run)


@pytest.mark.parametrize("num_steps", [1, 8])
def test_a_command_that_is_killed_with_its_agent_ends_with_its_last_event(num_steps: int) -> None:
    run = SimulatedRun()
    run.launch()
    run.steps(num_steps)
    killed_at = run.now
    run.pause(3600.0)
    resumed_at = run.now
    run.launch(first_step=num_steps)
    run.steps(4)
    run.end()
    account = run.account()
    assert account.wall_s == pytest.approx(killed_at - 1000 + run.now - resumed_at, abs=0.06)
    assert account.rows["start"] == pytest.approx(2 * 2 * 3.1)
    assert (account.num_launches, account.num_steps) == (2, num_steps + 4)


def test_a_clock_that_is_set_back_leaves_no_negative_time() -> None:
    run = SimulatedRun()
    run.launch()
    run.steps(5)
    run.now -= 100.0
    run.fault()
    run.steps(5)
    run.end()
    account = run.account()
    assert account.worker_s >= 0
    assert all(seconds >= 0 for name, seconds in account.rows.items() if name != UNACCOUNTED)
    assert sum(account.rows.values()) == pytest.approx(account.worker_s)


def test_others_wait_for_the_slowest_rank() -> None:
    run = SimulatedRun(num_ranks=4, slow={2: 0.3})
    run.launch()
    run.steps(10)
    run.end()
    account = assert_true(run)
    assert account.rows["straggler"] == pytest.approx(10 * 3 * 0.3)
    calm = SimulatedRun(num_ranks=4)
    calm.launch()
    calm.steps(10)
    calm.end()
    assert calm.account().rows["straggler"] == pytest.approx(0, abs=1e-9)


def test_stages_of_a_pipeline_are_not_compared() -> None:
    run = SimulatedRun(num_ranks=4, slow={0: 0.3, 1: 0.3}, layout="data=2 pipeline=2")
    run.launch()
    run.steps(10)
    run.end()
    assert run.account().rows["straggler"] == pytest.approx(0, abs=1e-9)


def test_skipped_steps_are_no_use() -> None:
    run = SimulatedRun()
    run.launch()
    run.steps(5)
    run.steps(2, taken=False)
    run.steps(5)
    run.end()
    assert assert_true(run).num_steps == 10


plans = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 30)),
        st.tuples(st.just("fault"), st.integers(0, 12)),
        st.tuples(st.just("restart"), st.integers(0, 12)),
    ),
    min_size=1,
    max_size=8,
)


@given(plans, st.sampled_from([{}, {1: 0.25}]))
def test_whatever_happens_the_rows_are_true(plan: list[tuple[str, int]], slow: dict[int, float]) -> None:
    run = SimulatedRun(num_ranks=2, slow=slow)
    run.launch()
    run.steps(3)
    for what, number in plan:
        if what == "steps":
            run.steps(number)
        elif what == "fault":
            run.fault(back_to=max(0, run._num_done - number))
            run.steps(2)
        else:
            run.end()
            run.pause(100.0)
            run.launch(first_step=max(0, run._num_done - number))
            run.steps(2)
    run.end()
    assert_true(run, tolerance=2e-3)


def test_time_that_nothing_explains_is_shown() -> None:
    """Control: a hole in the records is unaccounted, and not spread over the other rows."""
    run = SimulatedRun()
    run.launch()
    run.steps(100)
    run.end()
    for rank, events in run.ranks.items():
        run.ranks[rank] = [
            (at, event)
            for at, event in events
            if not (isinstance(event, StepDone | StepPhases) and 40 < event.step <= 60)
        ]
    account = run.account()
    assert account.rows[UNACCOUNTED] == pytest.approx(2 * 20 * (0.365 + 0.054), rel=0.01)
    assert sum(account.rows.values()) == pytest.approx(account.worker_s)


def test_a_running_run_has_an_account() -> None:
    run = SimulatedRun()
    run.launch()
    for _ in range(10):
        run.steps(1)
        account = run.account()
        assert abs(account.rows[UNACCOUNTED]) < 0.005 * account.worker_s
        assert account.worker_s == pytest.approx(2 * (run.now - 1000), rel=0.05)


def write(run: SimulatedRun, folder: Path) -> None:
    (folder / "metrics").mkdir(parents=True)
    for rank, events in run.ranks.items():
        lines = [{**encode(event), "at": at, "rank": rank} for at, event in events if event]
        (folder / "metrics" / f"rank-{rank:05d}.jsonl").write_bytes(b"".join(map(to_line, lines)))
    lines = [{**encode(line.event), "at": line.at, "rank": AGENT} for line in run.agent if line.event]
    (folder / "metrics" / "agent.jsonl").write_bytes(b"".join(map(to_line, lines)))


def faulty() -> SimulatedRun:
    run = SimulatedRun(num_ranks=4)
    run.launch()
    run.steps(10)
    run.fault(back_to=8)
    run.steps(10)
    run.end()
    return run


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = faulty()
    write(run, tmp_path)
    found, direct = load_account(tmp_path), run.account()
    assert found.rows == pytest.approx(direct.rows)
    assert (found.num_read, found.num_ranks) == (4, 4)


def test_a_large_run_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = faulty()
    write(run, tmp_path)
    monkeypatch.setattr(run_account, "_RANKS_READ", 2)
    found = load_account(tmp_path)
    assert (found.num_read, found.num_ranks) == (2, 4)
    assert found.worker_s == pytest.approx(run.account().worker_s)
    monkeypatch.setattr(step_reader, "OTHER_BYTES", 10)
    assert load_account(tmp_path).num_read == 1


@pytest.mark.parametrize("slow", [{}, {2: 0.1}])
def test_a_long_run_has_the_same_account_from_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: dict[int, float]
) -> None:
    run = SimulatedRun(num_ranks=3, slow=slow)
    run.launch()
    run.steps(300)
    run.fault(back_to=140)
    run.steps(200)
    run.steps(5, taken=False)
    run.steps(20)
    run.end()
    run.pause(3600.0)
    run.launch(first_step=330)
    run.steps(400)
    run.end()
    write(run, tmp_path)
    exact = load_account(tmp_path)
    small_blocks(monkeypatch)
    monkeypatch.setattr(step_reader, "OTHER_BYTES", 40)
    monkeypatch.setattr(step_reader, "_bytes_to_read", lambda path, whole_bytes: 1)
    record = read_rank(RankLog(tmp_path / "metrics" / "rank-00000.jsonl"))
    assert sum(session.num_summed for session in record.sessions) > 300, "most steps are known in sum only"
    found = load_account(tmp_path)
    for name in ROW_WORDS:
        assert found.rows[name] == pytest.approx(exact.rows[name], abs=2e-3 * exact.worker_s), name
    assert found.worker_s == pytest.approx(exact.worker_s)
    assert (found.num_steps, found.num_items, found.num_redone) == (exact.num_steps, exact.num_items, exact.num_redone)
    assert found.num_read == 3


def test_energy_is_added_up_over_intervals_and_ranks(tmp_path: Path) -> None:
    run = faulty()
    write(run, tmp_path)
    assert load_account(tmp_path).energy_j is None
    for rank in (0, 3):
        with (tmp_path / "metrics" / f"rank-{rank:05d}.jsonl").open("ab") as file:
            for joules in (100.0, 50, "many"):
                file.write(to_line({"event": "resources", "at": 1020.0, "rank": rank, "gpu": {"energy_j": joules}}))
    assert load_account(tmp_path).energy_j == pytest.approx(300)


def test_damaged_and_missing_files_cost_only_what_they_held(tmp_path: Path) -> None:
    run = faulty()
    write(run, tmp_path)
    path = tmp_path / "metrics" / "rank-00001.jsonl"
    path.write_bytes(path.read_bytes()[:700] + b'\n{"event": "phases", "at": 1e300, "seconds": NaN}\n\xff\xff')
    assert load_account(tmp_path).worker_s == pytest.approx(run.account().worker_s)
    (tmp_path / "metrics" / "rank-00000.jsonl").unlink()
    assert load_account(tmp_path).worker_s == pytest.approx(run.account().worker_s, rel=0.1)
    (tmp_path / "metrics" / "agent.jsonl").unlink()
    assert load_account(tmp_path).worker_s > 0
    assert load_account(tmp_path / "nowhere").worker_s == 0.0


def test_numbers_that_no_run_writes_are_ignored() -> None:
    run = SimulatedRun()
    run.launch()
    run.steps(5)
    run.emit(StepPhases(6, float("nan"), {"data": float("inf"), "forward": -5.0}))
    run.emit(StepDone(7, seconds=float("inf")))
    run.end()
    account = build_account({rank: record_of(events) for rank, events in run.ranks.items()}, run.agent)
    assert account.worker_s < 100
