from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from closeranks.core.config import job_file
from closeranks.core.config.job_file import read_job_file
from closeranks.core.config.load import load
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
    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(job_file.os, "open", refuse)
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
    job = read_job_file(path)
    assert job.values == {"train": {"steps": 3}}
    assert job.lines == {"train": 1, "train.steps": 2}


def test_a_device_is_no_job_file() -> None:
    assert message(Path("/dev/zero")) == "zero: /dev/zero is a device, not a file. Name a text file of TOML."


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert message(path) == f"job.toml: {path} holds more than the 1 MiB that a job may have. Name a text file of TOML."


def test_a_pipe_is_read_and_one_without_a_writer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.toml"
    os.mkfifo(path)
    monkeypatch.setattr(job_file, "_PIPE_S", 0.1)
    assert "is a pipe into which nothing was written for 0.1 s" in message(path)
    monkeypatch.setattr(job_file, "_PIPE_S", 60.0)
    writer = threading.Thread(target=lambda: path.write_text("[train]\nsteps = 5\n"))
    writer.start()
    assert read_job_file(path).values == {"train": {"steps": 5}}
    writer.join()


def test_of_very_many_problems_the_first_are_told_and_the_rest_counted(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[train]\n" + "".join(f"key{number} = 1\n" for number in range(5000)))
    with pytest.raises(ConfigError) as caught:
        load(Job, path, ())
    assert 50 < len(caught.value.problems) < 60
    assert "more problems" in str(caught.value)


def test_a_very_long_key_is_answered_at_once(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"[train]\n{'k' * 900_000} = 1\n")
    with pytest.raises(ConfigError, match="no such key"):
        load(Job, path, ())
