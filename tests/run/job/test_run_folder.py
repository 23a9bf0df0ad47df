from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from closeranks.core.errors import ConfigError, SetupError
from closeranks.core.world import World
from closeranks.run.job.job import Job, load_job
from closeranks.run.job.ownership import agree_on_folder
from closeranks.run.job.run_folder import choose_folder, free_folder, make_free_folder, prepare_folder
from closeranks.run.worker.agent_client import configure_worker


def job(**run: Any) -> Job:
    resume = run.pop("resume", "")
    extra = {"model": {}, "data": {}, "train": {"steps": 1}, "run": run, "checkpoint": {"resume": str(resume)}}
    return load_job(None, extra=extra).value


def held(folder: Path) -> Path:
    """A folder in which a run stands."""
    (folder / "metrics").mkdir(parents=True)
    return folder


def test_the_folder_is_the_jobs_else_named_after_it_else_after_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_folder(job(folder="here/run"), "tiny") == Path("here/run")
    assert choose_folder(job(name="mine"), "tiny") == Path("runs/mine")
    assert choose_folder(job(), "tiny") == Path("runs/tiny")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert choose_folder(job(folder="~/run"), "tiny") == tmp_path / "run"


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    wanted = tmp_path / "run"
    assert [held(free_folder(wanted)).name for _ in range(4)] == ["run", "run-2", "run-3", "run-4"]


@pytest.mark.parametrize("trace", ["metrics", "logs"])
def test_what_a_run_left_makes_a_folder_taken_and_what_others_left_does_not(tmp_path: Path, trace: str) -> None:
    wanted = tmp_path / "run"
    wanted.mkdir()
    (wanted / "notes.txt").write_text("mine")
    assert free_folder(wanted) == wanted
    (wanted / trace).mkdir()
    assert free_folder(wanted) == tmp_path / "run-2"


def test_a_gap_in_the_numbers_is_not_filled_over_something_else(tmp_path: Path) -> None:
    held(tmp_path / "run")
    (tmp_path / "run-2").write_text("a file")
    held(tmp_path / "run-3")
    assert free_folder(tmp_path / "run") == tmp_path / "run-4"


@pytest.mark.parametrize("tail", ["", "checkpoints", "checkpoints/step-00000004"])
@pytest.mark.parametrize("name", ["run", "run-2", "run-13"])
def test_a_resumed_run_stays_where_it_was(tmp_path: Path, name: str, tail: str) -> None:
    """Also where it had taken a numbered folder: its own advice is to resume from there."""
    held(tmp_path / "run")
    if name != "run":
        held(tmp_path / name)
    there = tmp_path / name
    assert choose_folder(job(folder=str(tmp_path / "run"), resume=there / tail), "x") == there


def test_another_jobs_run_is_resumed_into_a_folder_of_its_own(tmp_path: Path) -> None:
    other, near, elsewhere = held(tmp_path / "other"), held(tmp_path / "runner-2"), held(tmp_path / "a" / "run-2")
    held(tmp_path / "run")
    for resume in (other, near, elsewhere):
        assert choose_folder(job(folder=str(tmp_path / "run"), resume=resume), "x") == tmp_path / "run-2"


def test_a_relative_folder_and_an_absolute_resume_are_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    held(tmp_path / "run")
    assert choose_folder(job(folder="run", resume=tmp_path / "run"), "x") == Path("run")


def test_the_resolved_job_stands_in_the_folder_and_loads_back_equal(tmp_path: Path) -> None:
    given = job(name="mine", seed=3)
    prepare_folder(given, tmp_path / "run")
    assert load_job(tmp_path / "run" / "job.toml").value == given
    assert json.loads((tmp_path / "run" / "config.json").read_text())["run"]["seed"] == 3
    assert (tmp_path / "run" / "metrics").is_dir()
    assert (tmp_path / "run" / "logs").is_dir()


def test_a_folder_that_cannot_be_made_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"cannot be written: Not a directory\. Set run\.folder"):
        prepare_folder(job(), tmp_path / "file" / "run")


def test_rank_0_chooses_and_the_others_take_its_word(tmp_path: Path) -> None:
    """Another rank may look when rank 0 has made the folder already."""
    given = job(folder=str(tmp_path / "run"))
    told: list[str] = []
    with ExitStack() as held:
        assert agree_on_folder(given, World(), lambda text: told.append(text) or text, held) == tmp_path / "run"  # type: ignore[func-returns-value]
        assert agree_on_folder(given, World(rank=1, size=2), lambda text: told[0], held) == tmp_path / "run"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "the others make nothing"


def test_the_first_session_of_a_script_takes_the_folder_its_starter_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it names another; the logs that stand there already are its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["script.py"])
    own = make_free_folder(Path("runs/script"))
    for wanted, expected in [(job(), own), (job(folder="runs/script"), own), (job(folder="runs/next"), "runs/next")]:
        configure_worker(folder=own)
        with ExitStack() as held:
            held.callback(configure_worker)
            assert agree_on_folder(wanted, World(), str, held) == tmp_path / expected
            assert agree_on_folder(job(), World(), str, held) == tmp_path / "runs" / "script-2", "the second session"
        shutil.rmtree("runs")
        make_free_folder(Path("runs/script"))


@pytest.mark.parametrize("name", ["../../x", "a/b", "..", "a\nb", "x" * 201, "\\server"])
def test_a_name_is_one_part_of_a_path(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        job(name=name)
    assert choose_folder(job(name="exp 1.2_é"), "x") == Path("runs/exp 1.2_é")


def test_folders_that_belong_to_more_than_a_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home" / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home" / "work")
    for folder, words in [
        ("/", "the root folder"),
        ("~", "your home folder"),
        (".", "the working folder"),
        (str(tmp_path), "a parent of the working folder"),
    ]:
        with pytest.raises(SetupError, match=f"is {words}, and a run needs a folder of its own"):
            choose_folder(job(folder=folder), "x")
    assert list(tmp_path.rglob("*")) == [tmp_path / "home", tmp_path / "home" / "work"]
    (tmp_path / "empty").mkdir()
    assert choose_folder(job(folder=str(tmp_path / "empty")), "x") == tmp_path / "empty"
    monkeypatch.chdir(held(tmp_path / "run"))
    assert choose_folder(job(folder=".", resume="auto"), "x") == Path(), "a run may be continued from inside"


def test_files_of_others_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("a Hugging Face model's")
    wanted = str(tmp_path / "model")
    assert choose_folder(job(folder=wanted), "x") == tmp_path / "model-2"
    with pytest.raises(SetupError, match=r"holds no run, but config\.json, which the run would overwrite"):
        choose_folder(job(folder=wanted, resume="auto"), "x")


def test_a_window_of_the_profiler_lies_within_the_run() -> None:
    tables = {"model": {}, "data": {}, "train": {"steps": 4}}
    with pytest.raises(ConfigError, match=r"telemetry\.profile.*steps 100 to 109 lie beyond the run's 4"):
        load_job(None, extra={**tables, "telemetry": {"profile": "100:110"}})
    assert load_job(None, extra={**tables, "telemetry": {"profile": "4:110"}}).value.telemetry.profile
