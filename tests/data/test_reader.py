from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from closeranks.core.errors import DataError, SetupError
from closeranks.data.order import Schedule
from closeranks.data.reader import Reader, map_tensors, name_samples

from .doubles import ChangedSource, CountingSource, FailingSource


def reader(source: CountingSource, **options: Any) -> Reader:
    return Reader(source, Schedule.for_epochs(len(source), 8, 2, epochs=1), seed=5, **options)


@pytest.mark.parametrize("data_size", [1, 2, 3, 5, 8])
def test_ranks_together_read_what_one_reads(data_size: int) -> None:
    alone = [one for step in range(3) for one in reader(CountingSource(20)).read(step)]
    shared = [
        one
        for step in range(3)
        for rank in range(data_size)
        for one in reader(CountingSource(20), data_rank=rank, data_size=data_size).read(step)
    ]
    assert [one.micro_batch for one in shared] == [one.micro_batch for one in alone]
    for one, other in zip(alone, shared, strict=True):
        assert torch.equal(one.batch["x"], other.batch["x"])
    ids = torch.cat([one.batch["id"] for one in alone])
    assert sorted(ids.tolist()) == list(range(20))


def test_a_rank_reads_only_its_own_samples() -> None:
    source = CountingSource(20)
    reader(source, data_rank=1, data_size=2).read(0)
    expected = [m.indices(20, 5).tolist() for m in Schedule.for_epochs(20, 8, 2, epochs=1).assigned(0, 1, 2)]
    assert source.read_indices == expected


def test_a_rank_without_a_micro_batch_reads_nothing() -> None:
    source = CountingSource(20)
    assert reader(source, data_rank=7, data_size=8).read(2) == []
    assert source.read_indices == []


def test_an_error_names_data_samples_and_line() -> None:
    with pytest.raises(DataError) as caught:
        reader(FailingSource(8, bad=3, error=ValueError("torn file"))).read(0)
    assert "of failing raised ValueError: torn file" in caught.value.what
    assert "doubles.py:" in caught.value.what
    assert "3" in caught.value.what.split(" of ")[0]
    assert isinstance(caught.value.__cause__, ValueError)


def test_our_own_errors_pass_unchanged() -> None:
    error = SetupError("the disk is gone")
    with pytest.raises(SetupError) as caught:
        reader(FailingSource(8, bad=3, error=error)).read(0)
    assert caught.value is error


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_traced_to_their_sample(bad: float) -> None:
    values = torch.tensor([[0.0, 0.0], [0.0, bad]])
    source = ChangedSource(2, x=values)
    schedule = Schedule.for_epochs(2, 2, 2, epochs=1)
    culprit = schedule.micro_batches(0)[0].indices(2, 5)[1]
    with pytest.raises(DataError, match=f"'x' of changed holds NaN or infinity in sample {culprit}\\.") as caught:
        Reader(source, schedule, seed=5).read(0)
    assert "data.check_finite" in caught.value.fix
    (loaded,) = Reader(source, schedule, seed=5, check_finite=False).read(0)
    assert torch.equal(loaded.batch["x"], values) or bad != bad


def test_finite_check_handles_vectors_and_leaves_integers_alone() -> None:
    with pytest.raises(DataError, match="'y'"):
        reader(ChangedSource(2, y=torch.tensor([1.0, float("nan")]))).read(0)
    assert reader(ChangedSource(2, y=torch.tensor([1, 2]), z=torch.empty(2, 0))).read(0)


@pytest.mark.parametrize("value", [torch.zeros(3, 2), torch.tensor(1.0)])
def test_a_batch_with_other_rows_is_refused(value: torch.Tensor) -> None:
    with pytest.raises(DataError, match="for 2 samples"):
        reader(ChangedSource(2, x=value)).read(0)


def test_a_batch_must_be_a_dict_of_tensors() -> None:
    class Bare(CountingSource):
        def read(self, indices: Any) -> Any:
            return torch.zeros(len(indices))

    with pytest.raises(DataError, match="returned Tensor, not a dict of tensors"):
        reader(Bare(2)).read(0)


def test_map_tensors_reaches_into_containers() -> None:
    one = torch.ones(2)
    mapped = map_tensors({"a": one, "b": [one, (one, "text")], "c": 3}, lambda tensor: tensor + 1)
    assert torch.equal(mapped["a"], one + 1)
    assert torch.equal(mapped["b"][1][0], one + 1)
    assert (mapped["b"][1][1], mapped["c"]) == ("text", 3)
    assert isinstance(mapped["b"][1], tuple)


def test_naming_samples() -> None:
    assert name_samples(np.array([4])) == "sample 4"
    assert name_samples(np.arange(3)) == "samples 0, 1, 2"
    assert name_samples(np.arange(20), limit=2) == "samples 0, 1 and 18 more"
