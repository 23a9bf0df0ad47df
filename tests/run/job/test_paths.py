from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from closeranks.core.errors import DataError
from closeranks.run.job.job import Job, load_job
from closeranks.run.job.paths import missing_paths, resolve_existing_paths, resolve_paths


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file in a folder of its own; the working folder is beside it."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "both.txt").write_text(folder)
    (tmp_path / "there" / "beside.txt").write_text("x")
    (tmp_path / "there" / "corpus.bin").write_text("x")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "there" / "job.toml"


def job(data: dict[str, Any], **checkpoint: str) -> Job:
    tables = {"model": {}, "data": data, "train": {"steps": 1}, "checkpoint": checkpoint}
    return load_job(None, extra=tables).value


@pytest.mark.parametrize("path", ["both.txt", "stdlib", "/absolute", "s3://bucket/set", "nowhere.txt", "~/home.txt"])
def test_what_is_in_the_working_folder_or_no_relative_path_stays(file: Path, path: str) -> None:
    assert resolve_paths(job({"path": path}), file).data.path == path


def test_what_is_beside_the_job_file_is_found_there(file: Path) -> None:
    located = resolve_existing_paths(job({"path": "beside.txt"}, weights="beside.txt"), file)
    assert located.data.path == located.checkpoint.weights == str(file.parent / "beside.txt")
    tokens = resolve_paths(job({"name": "tokens", "path": "corpus", "eval_path": "both.txt"}), file).data
    assert (tokens.path, tokens.eval_path) == (str(file.parent / "corpus"), "both.txt")
    parts = {"a": {"weight": 1.0, "data": {"path": "beside.txt"}}}
    mixture = resolve_paths(job({"name": "mixture", "parts": parts}), file).data
    assert mixture.parts["a"].data.path == str(file.parent / "beside.txt")


def test_what_is_in_neither_is_told_with_its_key_and_both_places(file: Path) -> None:
    parts = {"web": {"weight": 1.0, "data": {"path": "nowhere.txt"}}}
    (problem,) = missing_paths(resolve_paths(job({"name": "mixture", "parts": parts}), file), file)
    here, there = file.parents[1] / "here", file.parent
    where = f"the working folder {here}, nor beside the job file in {there}"
    assert str(problem) == f"data.parts.web.data.path: there is no 'nowhere.txt' in {where}. Check the path."
    with pytest.raises(DataError, match=r"checkpoint\.weights: there is no 'gone\.pt' in the working folder"):
        resolve_existing_paths(job({"path": "/no/such"}, weights="gone.pt"), file)
