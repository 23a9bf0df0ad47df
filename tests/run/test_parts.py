from __future__ import annotations

from typing import Any

import pytest
import torch

from closeranks.core.errors import ConfigError, SetupError
from closeranks.core.world import World
from closeranks.models.build import spec_for
from closeranks.models.config import DigitsConfig, LlamaConfig
from closeranks.parallel.config import LayoutConfig
from closeranks.run.builder.context import batch_schedule, check_last_step, choose_device, device_index
from closeranks.run.components.model import loss_divisor
from closeranks.run.job.job import Job, check_workers, layout_for, load_job, micro_batch_size


def job(**tables: Any) -> Job:
    return load_job(None, extra={"model": {}, "data": {}, "train": {"steps": 1}, **tables}).value


def test_a_length_in_steps_or_in_epochs() -> None:
    assert batch_schedule(job(train={"steps": 7, "global_batch": 8}), 20).num_steps == 7
    by_epochs = batch_schedule(job(train={"epochs": 1.5, "global_batch": 8}), 20)
    assert (by_epochs.num_steps, by_epochs.total_samples) == (4, 30)


@pytest.mark.parametrize(
    ("batch", "named", "of_samples", "of_tokens"),
    [(32, 0, 8, 4), (3, 0, 1, 1), (7, 0, 1, 1), (64, 0, 16, 8), (100, 0, 16, 12), (256, 0, 32, 32), (32, 5, 5, 5)],
)
def test_a_micro_batch_follows_from_the_batch_and_the_kind_of_data_alone(
    batch: int, named: int, of_samples: int, of_tokens: int
) -> None:
    """A step has at least four, whatever the layout: a job that is compared under two layouts must not change."""
    train = {"steps": 1, "global_batch": batch, "micro_batch": named}
    for layout in ({}, {"data": 2, "zero": 1}, {"tensor": 2, "pipeline": 2}):
        assert micro_batch_size(job(train=train, layout=layout, **DIGITS)) == of_samples
        assert micro_batch_size(job(train=train, layout=layout)) == of_tokens


def test_more_workers_than_micro_batches_are_told_what_would_do() -> None:
    (problem,) = check_workers(job(train={"steps": 1, "global_batch": 32}, **DIGITS), 8)
    assert problem.what.startswith("8 data ranks share 4 micro-batches a step (global_batch 32 / micro_batch 8)")
    assert problem.fix.startswith("Use data=4 or fewer, train.micro_batch = 4, or a larger train.global_batch.")
    (problem,) = check_workers(job(train={"steps": 1, "global_batch": 8, "micro_batch": 1}, **DIGITS), 9)
    assert problem.fix.startswith("Use data=8 or fewer, or train.global_batch = 9 or more.")


@pytest.mark.parametrize(
    ("spec", "micro", "divisor"),
    [
        (spec_for(DigitsConfig(), seq_len=0), 1, 1.0),
        (spec_for(DigitsConfig(), seq_len=0), 16, 16.0),
        (spec_for(DigitsConfig(), seq_len=0), 17, 32.0),
        (spec_for(LlamaConfig(), seq_len=64), 3, 256.0),
    ],
)
def test_losses_are_divided_by_a_power_of_two_that_covers_a_micro_batch(spec: Any, micro: int, divisor: float) -> None:
    assert loss_divisor(spec, micro) == divisor


def test_a_job_that_asks_for_cuda_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert choose_device(job(), World()) == torch.device("cpu")
    with pytest.raises(SetupError, match=r"worker 1 of this host finds 0 CUDA devices.*run\.device = 'auto'"):
        choose_device(job(run={"device": "cuda"}), World(rank=1, size=2, local_rank=1, local_size=2))


SYNC = {"batch_norm": "sync"}
DIGITS = {"model": {"name": "digits"}, "data": {"name": "digits"}}


def test_synchronised_batch_norm_needs_full_rounds() -> None:
    even = job(train={"steps": 1, "global_batch": 16, "micro_batch": 4}, layout=SYNC, **DIGITS)
    assert check_workers(even, 2) == []
    (problem,) = check_workers(even, 3)
    assert problem.place == "layout.batch_norm"
    assert "3 data ranks" in problem.what
    assert problem.fix


def test_synchronised_batch_norm_and_a_short_last_step() -> None:
    """84 samples end in a step of one micro-batch: a rank without one would never answer the other."""
    table = {"epochs": 1.0, "global_batch": 16, "micro_batch": 4}
    by_epochs = job(train=table, layout=SYNC, **DIGITS)
    assert check_workers(by_epochs, 2) == [], "it takes the data to know"
    for num_samples in (80, 86, 88):  # full, two and three short ones left: 0, 2 and 2 micro-batches
        check_last_step(by_epochs, batch_schedule(by_epochs, num_samples), 2)
    with pytest.raises(ConfigError, match=r"layout\.batch_norm: .*1 micro-batches.*2 data ranks\. Give train\.steps"):
        check_last_step(by_epochs, batch_schedule(by_epochs, 84), 2)
    check_last_step(by_epochs, batch_schedule(by_epochs, 84), 1)
    check_last_step(job(train=table, **DIGITS), batch_schedule(by_epochs, 84), 2)


@pytest.mark.parametrize("axis", ["context", "expert"])
def test_an_axis_that_does_not_train_yet_is_refused_when_the_job_is_read(axis: str) -> None:
    with pytest.raises(ConfigError) as told:
        job(layout={axis: 2})
    (problem,) = told.value.problems
    assert problem.place == f"layout.{axis}"
    assert problem.fix == "Set it to 1."


def test_a_layout_for_another_number_of_workers_is_refused() -> None:
    (problem,) = check_workers(job(layout={"data": 3}), 2)
    assert problem.place == "layout"
    assert "-n 3" in problem.fix


def test_the_data_axis_takes_the_workers_that_are_left() -> None:
    assert layout_for(job(), 4).data == 4
    assert layout_for(job(layout={"data": 2}), 4).data == 2
    split = job().model_copy(update={"layout": LayoutConfig(tensor=2)})
    assert layout_for(split, 4).data == 2


def test_a_model_and_data_that_do_not_fit_each_other() -> None:
    with pytest.raises(ConfigError, match="model 'digits' reads labelled images, but data 'text' holds tokens"):
        job(model={"name": "digits"})


def test_each_worker_takes_a_device_of_its_own_where_there_are_enough() -> None:
    second = World(rank=1, size=2, local_rank=1, local_size=2, launcher="agent")
    assert device_index("auto", second, 2) == 1
    assert device_index("auto", second, 1) is None
    assert device_index("auto", second, 0) is None
    with pytest.raises(SetupError, match="finds 1 CUDA devices"):
        device_index("cuda", second, 1)


def test_a_slurm_task_that_sees_one_device_takes_it() -> None:
    task = World(rank=3, size=4, local_rank=1, local_size=2, launcher="slurm")
    assert device_index("auto", task, 1, is_own=True) == 0
    assert device_index("cuda", task, 1, is_own=True) == 0
    assert device_index("auto", task, 0, is_own=True) is None
    assert device_index("auto", task, 1) is None, "one device for two tasks is nobody's own"
    assert device_index("auto", task, 4) == 1
