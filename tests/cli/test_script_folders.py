"""Where a script that `closeranks run` started writes: one folder for everything, the one its session chose."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from closeranks.run.job.run_folder import make_free_folder
from tests.cli.commands import closeranks

pytestmark = [pytest.mark.world, pytest.mark.timeout(300)]
SCRIPT = """
import sys, torch, closeranks
print("printed before the session", flush=True)
closeranks.train(torch.nn.Linear(4, 1), torch.randn(8, 4), lambda model, batch: model(batch["x"]).mean(),
    run={"folder": sys.argv[1]}, train={"steps": 1, "global_batch": 8}, telemetry={"report": False},
    checkpoint={"save": False, "resume": "auto" if sys.argv[2:] else ""})
"""


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def run_and_check(tmp_path: Path, name: str, folder: Path) -> None:
    (tmp_path / "foo.py").write_text(SCRIPT)
    done = closeranks("run", "foo.py", name, cwd=tmp_path)
    assert done.code == 0, done.err
    assert (folder / "logs" / "rank-00000.log").read_text() == "printed before the session\n"
    assert {"job.toml", "logs/zygote.log", "metrics/rank-00000.jsonl", "status.json"} <= set(tree(folder))


def test_the_folder_that_the_session_names_holds_everything(tmp_path: Path) -> None:
    """Also where a run lies in the folder that was named: the next free one takes its place."""
    first = make_free_folder(tmp_path / "runs" / "foo")
    (first / "job.toml").touch()
    run_and_check(tmp_path, "runs/foo", tmp_path / "runs" / "foo-2")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["foo", "foo-2"]
    assert tree(first) == ["job.toml"]


@pytest.mark.slow
def test_a_folder_elsewhere_and_the_same_script_again(tmp_path: Path) -> None:
    run_and_check(tmp_path, "elsewhere/bar", tmp_path / "elsewhere" / "bar")
    run_and_check(tmp_path, "elsewhere/bar", tmp_path / "elsewhere" / "bar-2")
    assert tree(tmp_path / "runs") == []


@pytest.mark.slow
def test_logs_of_a_continued_run_follow_those_of_its_first_part(tmp_path: Path) -> None:
    (tmp_path / "foo.py").write_text(SCRIPT)
    for _ in range(2):
        assert closeranks("run", "foo.py", "runs/mine", "auto", cwd=tmp_path).code == 0
    log = tmp_path / "runs" / "mine" / "logs" / "rank-00000.log"
    assert log.read_text() == "printed before the session\n" * 2
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["mine"]


def test_scripts_that_start_at_the_same_moment_have_a_folder_each(tmp_path: Path) -> None:
    at_once, made = threading.Barrier(10), list[Path]()

    def start() -> None:
        at_once.wait()
        made.append(make_free_folder(tmp_path / "runs" / "foo"))

    threads = [threading.Thread(target=start) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 10
