"""A job on fewer workers: legal, nearest, and the same training."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.facts.layout import Layout
from closeranks.run.job.job import Job, check_workers, load_job
from closeranks.run.job.resize import ResizedJob, describe_samples, resize_job

LAYOUTS = (
    "data=1",
    "data=3",
    "data=4",
    "data=3 zero=1",
    "data=4 zero=2 shard=2",
    "data=8 zero=3 shard=4",
    "data=3 zero=3",
    "data=2 tensor=2",
    "tensor=2 pipeline=2",
    "pipeline=2 schedule=zbv",
    "pipeline=4",
    "data=2 pipeline=2 schedule=interleaved-1f1b",
    "data=2 zero=3 tensor=2 pipeline=2",
)
LLAMA = {"name": "llama", "dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64}
TABLES: dict[str, Any] = {
    "model": LLAMA,
    "data": {"name": "text", "seq_len": 16, "max_bytes": 20_000},
    "train": {"global_batch": 8, "micro_batch": 1, "steps": 3},
    "run": {"seed": 5},
    "optim": {"lr": 1e-2},
}


def job_of(layout: str | dict[str, Any], **tables: Any) -> Job:
    table = asdict(Layout.parse(layout)) if isinstance(layout, str) else layout
    return load_job(None, extra={**TABLES, "layout": table, **tables}).value


def fitted(job: Job, num_available: int, num_wanted: int = 0) -> ResizedJob:
    found = resize_job(job, num_available, num_wanted)
    assert found is not None
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_is_left_the_same_job_goes_on(layout: str) -> None:
    job, full = job_of(layout), Layout.parse(layout)
    sizes = []
    for num_available in range(1, full.num_ranks + 3):
        found = fitted(job, num_available)
        assert found.num_workers <= min(num_available, full.num_ranks)
        assert check_workers(found.job, found.num_workers) == []
        assert found.layout.num_ranks == found.num_workers
        assert found.layout.zero == full.zero
        changed = {key for key, value in found.job.model_dump().items() if value != job.model_dump()[key]}
        assert changed <= {"layout"}, "batches, order, seed and learning rate are the job's"
        kept = ("hold", "batch_norm", "context", "expert")
        assert [getattr(found.job.layout, key) for key in kept] == [getattr(job.layout, key) for key in kept]
        assert fitted(job, found.num_workers).layout == found.layout, "who asks again hears the same"
        sizes.append(found.num_workers)
    assert sizes == sorted(sizes), "with more at hand never fewer at work"
    assert sizes[full.num_ranks - 1 :] == [full.num_ranks] * 3
    whole = fitted(job, full.num_ranks)
    assert whole.job == job
    assert whole.summary == ""


@pytest.mark.parametrize(
    ("layout", "num_available", "expected"),
    [
        ("data=4", 3, "data=3"),
        ("data=4 zero=3", 3, "data=3 zero=3"),
        ("data=4 zero=2 shard=2", 3, "data=3 zero=2"),
        ("data=4 zero=2 shard=2", 2, "data=2 zero=2 shard=2"),
        ("data=8 zero=3 shard=4", 7, "data=7 zero=3"),
        ("data=2 tensor=2", 3, "tensor=2"),
        ("data=2 tensor=2", 1, "data=1"),
        ("tensor=2 pipeline=2", 3, "tensor=2"),
        ("pipeline=4", 3, "pipeline=3"),
        ("data=2 zero=3 tensor=2 pipeline=2", 7, "zero=3 tensor=2 pipeline=2"),
        ("data=2 zero=3 tensor=2 pipeline=2", 3, "data=3 zero=3"),
        ("data=2 pipeline=2 schedule=interleaved-1f1b", 3, "pipeline=2 schedule=interleaved-1f1b"),
    ],
)
def test_the_split_of_the_model_is_kept_as_fine_as_can_be(layout: str, num_available: int, expected: str) -> None:
    """A model that was split over workers may not fit one alone: rather let a worker stand by."""
    assert str(fitted(job_of(layout), num_available).layout) == expected


def test_a_job_without_a_number_takes_what_there_is() -> None:
    job = job_of({"zero": 3})
    assert [fitted(job, count, 4).num_workers for count in range(1, 7)] == [1, 2, 3, 4, 4, 4]
    assert fitted(job, 3, 4).job == job, "the table says it already"
    assert fitted(job, 3, 4).summary.startswith("3 of 4 workers: layout data=4 zero=3 -> data=3 zero=3; ")
    assert fitted(job, 3).summary == "", "of what nobody knows"
    split = job_of({"tensor": 2})
    assert [fitted(split, count, 6).num_workers for count in range(1, 8)] == [1, 2, 2, 4, 4, 6, 6]


def test_a_shard_that_no_longer_divides_is_given_up() -> None:
    job = job_of({"zero": 2, "shard": 2})
    assert str(fitted(job, 3, 4).layout) == "data=3 zero=2"
    assert str(fitted(job, 2, 4).layout) == "data=2 zero=2 shard=2"


def test_more_data_ranks_than_micro_batches_are_not_tried() -> None:
    job = job_of({}, train={"global_batch": 6, "micro_batch": 2, "steps": 3})
    assert fitted(job, 5, 5).num_workers == 3


def digits(layout: dict[str, Any], **train: Any) -> Job:
    tables = {"model": {"name": "digits"}, "data": {"name": "digits"}, "train": train}
    return job_of({"batch_norm": "sync", **layout}, **tables)


def test_synchronised_batch_norm_needs_an_even_share() -> None:
    job = digits({"data": 4}, global_batch=8, micro_batch=1, steps=3)
    found = fitted(job, 3)
    assert str(found.layout) == "data=2", "eight micro-batches do not go into three"
    assert found.summary.endswith("but batch norm is synchronised over 2 data ranks instead of 4")


def test_a_short_last_step_stays_even_under_synchronised_batch_norm() -> None:
    """How many micro-batches it has is known only when the data is open; a divisor of the data ranks is sure."""
    job = digits({"data": 4}, global_batch=12, micro_batch=1, epochs=1.0)
    assert fitted(job, 3).layout.data == 2
    assert fitted(digits({"data": 4}, global_batch=12, micro_batch=1, steps=3), 3).layout.data == 3


def own(**model: Any) -> dict[str, Any]:
    return {"model": {"name": "package.module:factory", **model}, "data": {"name": "package.module:data"}}


def test_a_model_of_ones_own_is_only_split_as_it_is_known_to_split() -> None:
    table = [{"pattern": "*.weight", "dim": 0}]
    assert str(fitted(job_of("tensor=4", **own(tensor=table)), 3).layout) == "tensor=2", "three need not divide it"
    stages = ["embed", "blocks.*", "head"]
    assert str(fitted(job_of("pipeline=4", **own(stages=stages)), 3).layout) == "pipeline=3"
    assert str(fitted(job_of("data=4", **own(stages=stages)), 3).layout) == "data=3"


def test_too_few_are_none() -> None:
    job = job_of("data=4", elastic={"min_workers": 3})
    assert fitted(job, 3).num_workers == 3
    assert resize_job(job, 2) is None
    assert resize_job(job, 0) is None


def test_what_changed_is_said() -> None:
    assert fitted(job_of("data=4 zero=3"), 3).summary == (
        "3 of 4 workers: layout data=4 zero=3 -> data=3 zero=3; same batch, order and learning rate"
    )
    assert "pipeline=2 schedule=zbv -> data=1;" in fitted(job_of("pipeline=2 schedule=zbv"), 1).summary


@given(
    data=st.integers(1, 6),
    zero=st.integers(0, 3),
    tensor=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([1, 2, 3]),
    schedule=st.sampled_from(["1f1b", "zbv", "gpipe"]),
    global_batch=st.integers(1, 12),
    least=st.integers(1, 3),
)
def test_laws_over_any_legal_job(
    data: int, zero: int, tensor: int, pipeline: int, schedule: str, global_batch: int, least: int
) -> None:
    layout = {"data": data, "zero": zero, "tensor": tensor, "pipeline": pipeline, "schedule": schedule}
    train = {"global_batch": global_batch, "micro_batch": 1, "steps": 3}
    job = job_of(layout, train=train, elastic={"min_workers": least})
    full = data * tensor * pipeline
    if check_workers(job, full) or least > full:
        return
    last = 0
    for num_available in range(1, full + 1):
        found = resize_job(job, num_available)
        size = found.num_workers if found else 0
        assert last <= size <= num_available
        assert size == 0 or size >= least
        if found:
            assert check_workers(found.job, size) == []
        last = size
    assert last == full


def test_the_samples_of_a_step_are_named_as_the_data_tools_count() -> None:
    assert describe_samples(job_of("data=1"), 3) == (
        "samples 16 to 23 of the run; `closeranks data show 16 JOB.toml` shows the first"
    )


def test_it_decides_without_torch() -> None:
    code = "import sys, closeranks.run.job.resize; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_layouts_cover_every_axis() -> None:
    parsed = [Layout.parse(text) for text in LAYOUTS]
    assert {(one.tensor > 1, one.pipeline > 1) for one in parsed} == set(product((False, True), repeat=2))
    assert {one.zero for one in parsed} == {0, 1, 2, 3}
