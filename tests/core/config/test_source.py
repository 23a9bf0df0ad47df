from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.core.config.load import load
from closeranks.core.config.source import read_job
from closeranks.core.errors import ConfigError

from .job_shapes import Job


def message(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(Job, path, ())
    (problem,) = caught.value.problems
    return str(problem)


def test_a_missing_file_names_the_one_that_was_meant(tmp_path: Path) -> None:
    (tmp_path / "job.toml").touch()
    (tmp_path / "other.toml").touch()
    path = tmp_path / "jbo.toml"
    assert message(path) == f"jbo.toml: no job file at {path}. Did you mean '{tmp_path / 'job.toml'}'?"


def test_a_missing_file_lists_what_is_there(tmp_path: Path) -> None:
    assert message(tmp_path / "x.toml").endswith("There are no *.toml files in that folder.")
    for name in ("alpha.toml", "beta.toml", "notes.txt"):
        (tmp_path / name).touch()
    assert message(tmp_path / "zzz").endswith("The job files there are: alpha.toml, beta.toml.")


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    path = tmp_path / "no" / "job.toml"
    assert message(path) == f"job.toml: no job file at {path}. There is no folder {path.parent} either."


def test_a_folder_is_not_a_job(tmp_path: Path) -> None:
    assert message(tmp_path).endswith("is a folder, not a job file. Give the path of a *.toml file.")
    (tmp_path / "job.toml").touch()
    assert message(tmp_path).endswith(f"Did you mean '{tmp_path / 'job.toml'}'?")


def test_an_unreadable_file_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    path = tmp_path / "job.toml"
    expected = f"job.toml: the job file {path} cannot be read: permission denied. Check the path and its permissions."
    assert message(path) == expected


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "file/job.toml"])
def test_a_path_that_cannot_be_is_a_problem(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    assert "cannot be read" in message(tmp_path / name)


def test_not_utf8_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"[run]\nname = 'caf\xe9'\n")
    expected = "job.toml: the job file is not UTF-8 text (byte 17, line 2). Save it again with the encoding UTF-8."
    assert message(path) == expected
    path.write_bytes("[run]\n".encode("utf-16"))
    assert "not UTF-8" in message(path)


def test_what_windows_editors_add_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 3\r\n")
    job = read_job(path)
    assert job.values == {"train": {"steps": 3}}
    assert job.lines == {"train": 1, "train.steps": 2}
