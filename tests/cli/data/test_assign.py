"""``closeranks data assign``: who reads what at a step, and what a resize changes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from closeranks.data.sampling.permutation import sample_indices
from tests.cli.data.calling import data

JOB = """
[run]
seed = 5
[model]
name = "llama"
preset = "tiny"
[data]
name = "text"
seq_len = 32
max_bytes = 20000
[train]
steps = 10
global_batch = 12
micro_batch = 2
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def test_ranks_take_their_share_of_the_step(job: Path) -> None:
    told = json.loads(data("assign", "-n", 4, "-n", 3, "--step", 3, "--json").out)
    assert told["step"] == 3
    assert {one["step"] for share in told["workers"]["4"] for one in share["micro_batches"]} == {3}
    assert (told["first_position"], told["last_position"], told["num_steps"]) == (24, 35, 10)
    num_samples = 594 - 30
    expected = sample_indices(np.arange(24, 36), num_samples, 5).tolist()
    for count, sizes in (("4", [4, 4, 2, 2]), ("3", [4, 4, 4])):
        shares = told["workers"][count]
        assert [len(share["samples"]) for share in shares] == sizes
        assert [sample for share in shares for sample in share["samples"]] == expected


def test_the_table_and_what_changes(job: Path) -> None:
    said = data("assign", "-n", 4, "-n", 3, job, "--step", 3)
    assert said.code == 0
    assert "step 3 of 10, epoch 0: positions 24 to 35, 12 samples in 6 micro-batches" in said.out
    assert "4 workers, 4 data ranks" in said.out
    assert "3 workers, 3 data ranks" in said.out
    assert (
        "4 and 3 data ranks read the same 12 positions with the same samples, each exactly once; 2 of them" in said.out
    )


def test_steps_count_from_one_as_in_training(job: Path) -> None:
    first = data("assign", "-n", 2)
    assert "step 1 of 10, epoch 0: positions 0 to 11, " in first.out
    assert data("assign", "-n", 2, "--step", 1).out == first.out
    assert "step 10 of 10, epoch 0: positions 108 to 119, " in data("assign", "-n", 2, "--step", 10).out
    assert data("assign", "-n", 2, "--step", 0).code == 2


def test_a_short_last_step_leaves_ranks_without(job: Path) -> None:
    job.write_text(JOB.replace("steps = 10", "epochs = 0.01"))
    said = data("assign", "-n", 4)
    assert "6 samples in 3 micro-batches" in said.out
    assert [line.split()[1] for line in said.out.splitlines()[4:]] == ["0", "1", "2", "none"]


def test_ranks_of_one_model_are_one_data_rank(job: Path) -> None:
    said = data("assign", "-n", 4, "layout.tensor=2")
    assert "4 workers, 2 data ranks" in said.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-n", 2, "--step", 11], "has 10 steps, and step 11 was asked for"),
        (["-n", 3, "layout.tensor=2"], "3 were asked for"),
        (["-n", 2, "nope.toml"], "nope.toml"),
        (["-n", 2, "train.stepps=3"], "stepps"),
    ],
)
def test_bad_input_is_a_sentence(job: Path, words: list[object], sentence: str) -> None:
    said = data("assign", *words)
    assert said.code == 2
    assert sentence in said.err
