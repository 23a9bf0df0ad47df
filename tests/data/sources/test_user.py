from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import UnidentifiedImageError
from torch import Tensor
from torch.utils.data import TensorDataset

from closeranks.core.errors import BadRecordError, DataError, UserError
from closeranks.core.protocols import DataSource
from closeranks.data.config import UserDataConfig
from closeranks.data.loading.read_settings import ReadSettings
from closeranks.data.loading.sample_reader import read_samples
from closeranks.data.sources.open import open_source
from closeranks.data.sources.user import MapSource, as_source, open_user
from closeranks.data.timing import measure


class Rows:
    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def read(dataset: Any, *indices: int) -> Any:
    return MapSource(dataset).read(np.array(indices))


def test_dicts_stay_dicts() -> None:
    batch = read(Rows({"a": torch.zeros(3), "n": 1}, {"a": torch.ones(3), "n": 2}), 1, 0)
    assert batch["a"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert batch["n"].tolist() == [2, 1]


def test_pairs_become_x_and_y() -> None:
    batch = read(TensorDataset(torch.arange(6).reshape(3, 2), torch.arange(3)), 2, 0)
    assert batch["x"].tolist() == [[4, 5], [0, 1]]
    assert batch["y"].tolist() == [2, 0]


@pytest.mark.parametrize("sample", [torch.tensor([7.0]), np.array([7.0])])
def test_single_tensors_become_x(sample: Any) -> None:
    batch = read([sample, sample], 0, 1)
    assert list(batch) == ["x"]
    assert batch["x"].tolist() == [[7.0], [7.0]]


def test_plain_numbers_become_x() -> None:
    assert read([3, 4, 5], 2, 1)["x"].tolist() == [5, 4]


def test_a_batched_getter_is_called_once() -> None:
    calls = []

    class Batched(Rows):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            calls.append(indices)
            return [self.rows[index] for index in indices]

    assert read(Batched(10, 20, 30), 2, 0)["x"].tolist() == [30, 10]
    assert calls == [[2, 0]]


@pytest.mark.parametrize("sample", [(1, 2, 3), "text"])
def test_samples_without_names_are_refused(sample: Any) -> None:
    with pytest.raises(DataError, match=r"is of type \w+, which cannot be named.*Return a dict of tensors, a pair"):
        read([sample], 0)


def test_an_error_names_the_sample_and_the_line() -> None:
    class Torn(Rows):
        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise ValueError("bad row")
            return super().__getitem__(index)

    with pytest.raises(DataError, match=r"sample 1 of torn raised ValueError: bad row \(.*test_user.py:\d+\)"):
        MapSource(Torn(1, 2), "torn").read(np.array([0, 1]))


class Raising(Rows):
    """Samples that are errors are raised."""

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.rows[index], BaseException):
            raise self.rows[index]
        return self.rows[index]


@pytest.mark.parametrize(
    "error", [ValueError("bad row"), OSError("image file is truncated"), UnidentifiedImageError("cannot identify")]
)
def test_a_sample_that_is_at_fault_itself_may_be_skipped(error: Exception) -> None:
    with pytest.raises(BadRecordError, match="sample 1 of torn raised"):
        MapSource(Raising(1, error), "torn").read(np.array([0, 1]))


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file"), ConnectionResetError("lost"), TimeoutError(), MemoryError()]
)
def test_data_out_of_reach_is_no_samples_fault(error: Exception) -> None:
    with pytest.raises(DataError, match="sample 1 of torn raised") as caught:
        MapSource(Raising(1, error), "torn").read(np.array([0, 1]))
    assert not isinstance(caught.value, BadRecordError)


def test_a_batched_getter_that_fails_names_all_it_was_asked_for() -> None:
    class Batched(Rows):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            raise ValueError("one of them")

    with pytest.raises(BadRecordError, match=r"one of samples 2, 0 of torn raised ValueError"):
        MapSource(Batched(1, 2, 3), "torn").read(np.array([2, 0]))
    with pytest.raises(BadRecordError, match=r"sample 2 of torn raised ValueError"):
        MapSource(Batched(1, 2, 3), "torn").read(np.array([2]))


def test_stacking_is_counted_under_its_name() -> None:
    tries = []
    for _ in range(5):  # somebody else may have the processor while it reads
        with measure() as times:
            MapSource([torch.zeros(200_000)] * 8).read(np.arange(8))
        tries.append(times)
    assert any(times.collate_s > times.read_s for times in tries)


def test_empty_and_foreign_datasets() -> None:
    with pytest.raises(DataError, match="the dataset is empty"):
        MapSource([])
    with pytest.raises(DataError, match="generator is not a map-style dataset"):
        MapSource(value for value in (1, 2))


def test_identity() -> None:
    assert MapSource([1, 2]).identity == "builtins.list (2 samples)"
    assert MapSource([1], "mine").identity == "mine"


def test_what_reads_already_is_used_as_it_is() -> None:
    own = MapSource([1, 2])
    assert as_source(own) is own
    assert isinstance(as_source([1, 2], "mine"), MapSource)

    class Hollow(MapSource):
        def __len__(self) -> int:
            return 0

    with pytest.raises(DataError, match="is empty"):
        as_source(Hollow([1]))


MODULE = """
import torch
from torch.utils.data import TensorDataset

def make(n=4, offset=0):
    return TensorDataset(torch.arange(n) + offset)

def pairs(n):
    return [(torch.tensor([float(i)]), i) for i in range(n)]

def fails(n):
    return 1 // 0

def nothing():
    pass

READY = [1, 2, 3]
"""


@pytest.fixture(autouse=True)
def _user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_data.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def opened(split: str = "train", **keys: Any) -> DataSource | None:
    return open_source(UserDataConfig(**keys), split, 0)  # type: ignore[call-overload, no-any-return]


def test_a_factory_by_name() -> None:
    source = opened(name="their_data:pairs", args={"n": 3})
    assert source is not None
    assert len(source) == 3
    assert source.read(np.array([2]))["x"].tolist() == [[2.0]]
    assert source.identity == "their_data:pairs"


def test_a_ready_dataset_by_name() -> None:
    source = opened(name="their_data:READY")
    assert source is not None
    assert source.read(np.array([0, 2]))["x"].tolist() == [1, 3]


def test_evaluation_has_its_own_factory_and_arguments() -> None:
    keys = {"name": "their_data:pairs", "args": {"n": 3}}
    assert opened("eval", **keys) is None
    held_out = opened("eval", **keys, eval="their_data:pairs", eval_args={"n": 2})
    assert held_out is not None
    assert len(held_out) == 2


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"name": "their_data:fails", "args": {"n": 3}},
            r"calling it with \(n=3\) raised ZeroDivisionError.*\.py:12\)",
        ),
        ({"name": "their_data:pairs", "args": {"m": 3}}, r"raised TypeError.*unexpected keyword argument 'm'"),
        ({"name": "their_data:nothing"}, "returned None"),
        ({"name": "their_data:pairs", "args": {"n": 0}}, "the dataset is empty"),
        ({"name": "their_data:pears"}, "Did you mean 'pairs'"),
        ({"name": "nowhere_at_all:make"}, "there is no module 'nowhere_at_all'"),
    ],
)
def test_a_factory_that_does_not_serve(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        opened(**keys)
    assert caught.value.fix


def test_a_tensor_dataset_of_one_column_is_x() -> None:
    source = opened(name="their_data:make", args={"offset": 5})
    assert source is not None
    batch = source.read(np.array([0, 2]))
    assert {name: value.tolist() for name, value in batch.items()} == {"x": [5, 7]}


class Words:
    """Samples of unequal length."""

    def __init__(self, lengths: Sequence[int], *, as_dict: bool = False) -> None:
        self.lengths, self.as_dict = lengths, as_dict

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        x, y = torch.full((self.lengths[index],), index), torch.tensor(index)
        return {"ids": x, "label": y} if self.as_dict else (x, y)


def padded(samples: list[Any]) -> dict[str, Tensor]:
    x = torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True, padding_value=-1)
    return {"x": x, "y": torch.stack([y for _, y in samples])}


def padded_pair(samples: list[Any]) -> tuple[Tensor, Tensor]:
    batch = padded(samples)
    return batch["x"], batch["y"]


def only_x(samples: list[Any]) -> Tensor:
    return padded(samples)["x"]


def test_samples_of_unequal_length_name_their_lengths_and_what_to_do() -> None:
    said = (
        "samples 0, 1, 2 of {} do not stack into one micro-batch of 3: {} has lengths 5, 7. Give collate=, a function "
        "that pads a list of samples into one batch (data.collate in a job file), or make them equal in the dataset; "
        "train.micro_batch = 1 takes them one by one."
    )
    for data, field in ((Words([5, 7, 5]), "'x'"), (Words([5, 7, 5], as_dict=True), "'ids'")):
        source = as_source(data)
        with pytest.raises(DataError) as caught:
            source.read(np.array([0, 1, 2]))
        assert str(caught.value) == said.format(source.identity, field)
        assert not isinstance(caught.value, BadRecordError), "no sample is at fault"
    with pytest.raises(DataError, match=r"'x' has shapes \(2, 3\), \(2, 4\)\."):
        as_source([torch.zeros(2, 3), torch.zeros(2, 4)]).read(np.array([0, 1]))
    with pytest.raises(DataError, match="'x' has lengths 2, 3"):
        as_source([([1, 2], 0), ([1, 2, 3], 1)]).read(np.array([0, 1]))


@pytest.mark.parametrize(("collate", "names"), [(padded, "xy"), (padded_pair, "xy"), (only_x, "x")])
def test_a_collate_function_makes_the_batch(collate: Any, names: str) -> None:
    batch = as_source(Words([2, 3]), collate=collate).read(np.array([0, 1]))
    assert list(batch) == list(names)
    assert batch["x"].tolist() == [[0, 0, -1], [1, 1, 1]]


def test_a_collate_function_that_fails_is_told_as_such() -> None:
    def failing(samples: list[Any]) -> Any:
        if any(len(x) == 3 for x, _ in samples):
            raise ValueError("three is too long")
        return padded(samples)

    source = as_source(Words([2, 3, 4]), collate=failing)
    with pytest.raises(BadRecordError, match=r"collating samples 0, 1 of .* raised ValueError: three is too long"):
        source.read(np.array([0, 1]))
    # the sample that it cannot take is found, and skipped where the job says so
    rows = read_samples(source, np.array([0, 1, 2]), ReadSettings(on_bad="skip"))
    assert [bad.sample for bad in rows.skipped] == [1]
    assert rows.batch["y"].tolist() == [0, 2]
    with pytest.raises(DataError, match=r"what collate returned for .* is of type str"):
        as_source(Words([2, 3]), collate=lambda samples: "no").read(np.array([0, 1]))


def test_a_collate_function_that_does_not_serve() -> None:
    with pytest.raises(DataError, match="collate is of type int, which cannot be called"):
        as_source(Words([2]), collate=3)
    with pytest.raises(DataError, match=r"collate is given, but .* reads whole batches itself"):
        as_source(MapSource(Words([2])), collate=padded)


def test_a_job_names_its_collate_function() -> None:
    here = "tests.data.sources.test_user"
    config = UserDataConfig(name=f"{here}:Words", args={"lengths": [2, 3]}, collate=f"{here}:padded")
    source = open_user(config, "train", 0)
    assert source is not None
    assert source.read(np.array([0, 1]))["x"].shape == (2, 3)
    with pytest.raises(ValueError, match="does not name an object"):
        UserDataConfig(name="a:b", collate="padded")
