"""What the agent sees becomes a status that others can read: pure values in, a file out."""

import time
from pathlib import Path

from closeranks.agent.detection.progress import WorkerPhase, WorkerProgress
from closeranks.agent.job_view import HostView, JobView, WorkerView
from closeranks.core.events import RankLost, RanksClosed, RunStarted, Snapshotting, StepDone, Warned
from closeranks.run.job.status_updates import StatusUpdater
from closeranks.telemetry.live.status import RunStatus, read_status


def view(generation: int = 0, state: str = "running", size: int = 2) -> JobView:
    seen = tuple(WorkerView(rank, "here", 1, WorkerProgress(7, WorkerPhase.COMPUTE, 0.0)) for rank in range(size))
    return JobView(time.monotonic(), state, generation, size, seen, (HostView("here", 2, "member"),), (), 4096)


def status_in(folder: Path) -> RunStatus:
    status = read_status(folder)
    assert status is not None
    return status


def test_a_run_is_written_down_from_its_start_to_its_end(tmp_path: Path) -> None:
    standing = StatusUpdater(tmp_path)
    assert standing.update(view(0, "starting", 0)) <= time.monotonic() + 0.5
    assert status_in(tmp_path).state == "starting"
    for event in (RunStarted(last_step=40), StepDone(step=6), Snapshotting(3, 2, 100), Warned("mind the gap", 3)):
        standing.handle(event)
    standing.update(view())
    status = status_in(tmp_path)
    assert (status.state, status.step, status.num_steps, status.snapshot_every) == ("running", 6, 40, 2)
    assert status.snapshot_bytes == 4096
    assert [worker.phase for worker in status.workers] == ["computing gradients"] * 2
    assert [one.text for one in status.happened] == ["warning at step 3: mind the gap"]
    standing.finish("finished")
    assert status_in(tmp_path).has_ended


def test_a_fault_is_told_while_it_is_under_way_and_after(tmp_path: Path) -> None:
    standing = StatusUpdater(tmp_path)
    standing.update(view())
    standing.handle(RankLost(0, 1, "", 7, "killed", "killed by SIGKILL"))
    standing.update(view(0, "closing ranks"))
    said = "rank 1 lost at step 7 (killed by SIGKILL)"
    assert [one.text for one in status_in(tmp_path).happened] == [f"{said}; closing ranks ..."]
    standing.handle(RanksClosed(1, 7, 0.9, 1, 2))
    standing.update(view(1))
    assert [one.text for one in status_in(tmp_path).happened] == [f"{said}; closed ranks in 0.9 s"]


def test_a_fault_that_ended_the_run_is_told_without_a_closing(tmp_path: Path) -> None:
    standing = StatusUpdater(tmp_path)
    standing.update(view())
    standing.handle(RankLost(0, 1, "", 7, "killed", "killed by SIGKILL"))
    standing.finish("failed")
    assert [one.text for one in status_in(tmp_path).happened] == ["rank 1 lost at step 7 (killed by SIGKILL)"]


def test_a_run_that_is_refused_leaves_the_status_it_found(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("of an earlier part")
    standing = StatusUpdater(tmp_path)
    standing.update(view(0, "starting"))
    standing.finish("failed")
    assert (tmp_path / "status.json").read_text() == "of an earlier part"
    standing = StatusUpdater(tmp_path)
    standing.handle(RunStarted(last_step=40))
    standing.update(view())
    assert status_in(tmp_path).state == "running"


def test_a_script_that_writes_elsewhere_has_its_status_there(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    standing = StatusUpdater(first)
    standing.update(view(0, "starting"))
    standing.set_folder(second)
    standing.handle(RunStarted(last_step=40))
    standing.update(view())
    assert not (first / "status.json").exists()
    assert status_in(second).run == str(second)


def test_whoever_looks_beside_is_heeded(tmp_path: Path) -> None:
    seen: list[int] = []

    def other(one: JobView) -> float | None:
        seen.append(one.generation)
        return 5.0

    look = StatusUpdater(tmp_path).chained_with(other)
    assert look(view(3)) == 5.0
    assert seen == [3]
    assert StatusUpdater(tmp_path).chained_with(None)(view()) is not None
