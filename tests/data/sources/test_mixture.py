from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import BadRecordError, DataError
from closeranks.core.protocols import Batch
from closeranks.data.config import MixtureConfig
from closeranks.data.dataset_protocol import Ints
from closeranks.data.source import LoaderSource
from closeranks.data.sources.mixture import MixtureSource, SampleTensorSpec, WeightedSource, common_fields
from closeranks.data.sources.open import open_source


class Numbered:
    """Sample i of part p holds ``1000 * p + i``; remembers what was asked of it."""

    block = 4

    def __init__(self, part: int, num_samples: int, dtype: str = "int64", width: int = 2, bad: tuple[int, ...] = ()):
        self.identity = f"numbered {part}"
        self.vocab_size = 10 * part
        self._part, self._num_samples, self._dtype, self._width, self._bad = part, num_samples, dtype, width, bad
        self.reads: list[list[int]] = []
        self.wanted: list[list[int]] = []
        self.is_closed = False

    def __len__(self) -> int:
        return self._num_samples

    def read(self, indices: Ints) -> Batch:
        self.reads.append(indices.tolist())
        assert all(0 <= index < self._num_samples for index in indices.tolist())
        if set(self._bad) & set(indices.tolist()):
            raise BadRecordError("torn", "Mend it.")
        values = np.repeat((1000 * self._part + indices)[:, None], self._width, axis=1)
        return {"tokens": torch.from_numpy(values.astype(self._dtype)), "part": torch.full((len(indices),), self._part)}

    def where(self, index: int) -> str:
        return f"'file', row {index}" if self._part else ""

    def prefetch(self, indices: Ints) -> None:
        self.wanted.append(indices.tolist())

    def close(self) -> None:
        self.is_closed = True


def mixed(*sources: LoaderSource) -> MixtureSource:
    return MixtureSource([WeightedSource(f"p{number}", source, number + 1.0) for number, source in enumerate(sources)])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_rows_come_in_the_order_asked_for(sizes: list[int], data: Any) -> None:
    source = mixed(*(Numbered(part, size) for part, size in enumerate(sizes)))
    assert len(source) == sum(sizes)
    every = [1000 * part + index for part, size in enumerate(sizes) for index in range(size)]
    asked = data.draw(st.lists(st.integers(0, len(every) - 1), min_size=1, max_size=20))
    batch = source.read(np.array(asked))
    assert batch["tokens"][:, 0].tolist() == [every[index] for index in asked]
    assert batch["part"].tolist() == [every[index] // 1000 for index in asked]


def test_each_part_is_read_once_per_batch() -> None:
    one, two = Numbered(0, 5), Numbered(1, 5)
    source = mixed(one, two)
    one.reads.clear(), two.reads.clear()
    source.read(np.array([7, 0, 9, 3, 7]))
    assert (one.reads, two.reads) == ([[0, 3]], [[2, 4, 2]])


def test_small_integers_are_widened_for_good() -> None:
    source = mixed(Numbered(0, 5, "uint8"), Numbered(1, 5, "uint16"))
    for asked in ([0, 1], [6, 7], [7, 0]):
        assert source.read(np.array(asked))["tokens"].dtype == torch.uint16, "whichever parts a batch happens to hold"
    assert mixed(Numbered(0, 5, "uint16"), Numbered(1, 5, "int32")).read(np.array([0]))["tokens"].dtype == torch.int32
    assert source.read(np.array([5, 0]))["tokens"].long().tolist() == [[1000, 1000], [0, 0]]


def test_what_the_order_and_the_run_ask() -> None:
    source = mixed(Numbered(0, 5), Numbered(2, 7))
    assert isinstance(source, LoaderSource)
    assert [len(part) for part in source.parts] == [5, 7]
    assert source.weights == (1.0, 2.0)
    assert source.vocab_size == 20
    assert source.identity == "mixture of p0 x 1: numbered 0, p1 x 2: numbered 2"
    assert source.where(3) == "sample 3 of p0"
    assert source.where(6) == "sample 1 of p1, 'file', row 1"


def test_what_is_wanted_goes_to_its_part_in_order() -> None:
    one, two = Numbered(0, 5), Numbered(1, 5)
    source = mixed(one, two)
    source.prefetch(np.array([9, 4, 0, 5]))
    assert (one.wanted, two.wanted) == ([[4, 0]], [[4, 0]])
    source.close()
    assert one.is_closed
    assert two.is_closed


def test_it_can_be_pickled() -> None:
    source = pickle.loads(pickle.dumps(mixed(Numbered(0, 5), Numbered(1, 5))))
    assert source.read(np.array([6, 1]))["tokens"][:, 0].tolist() == [1001, 1]


def test_parts_of_different_shapes_are_refused_when_opened() -> None:
    with pytest.raises(
        DataError, match=r"'tokens' is int64\[2\] in part 'p0' of the mixture and int64\[3\] in part 'p1'"
    ):
        mixed(Numbered(0, 5), Numbered(1, 5, width=3))


def test_a_part_that_is_packed_and_one_that_is_not() -> None:
    field = SampleTensorSpec(torch.int64, (8,))
    parts = {"web": {"tokens": field}, "code": {"tokens": field, "documents": field}}
    with pytest.raises(DataError, match=r"parts 'web' and 'code'.*: tokens and documents, tokens.*same data.packing"):
        common_fields(parts)


@pytest.mark.parametrize(
    ("one", "other"), [("float32", "float64"), ("int64", "float32"), ("bool", "uint8"), ("bfloat16", "float32")]
)
def test_only_integers_are_widened(one: str, other: str) -> None:
    dtypes = [getattr(torch, name) for name in (one, other)]
    with pytest.raises(DataError, match=f"'x' is {one}"):
        common_fields({"a": {"x": SampleTensorSpec(dtypes[0], ())}, "b": {"x": SampleTensorSpec(dtypes[1], ())}})
    assert (
        common_fields({"a": {"x": SampleTensorSpec(dtypes[0], ())}, "b": {"x": SampleTensorSpec(dtypes[0], ())}})[
            "x"
        ].dtype
        == dtypes[0]
    )


def test_a_part_whose_later_samples_differ() -> None:
    class Growing(Numbered):
        def read(self, indices: Ints) -> Batch:
            return {**super().read(indices), "tokens": torch.zeros(len(indices), 2 + int(indices.max() > 2))}

    source = mixed(Numbered(0, 5, "float32"), Growing(1, 5))
    with pytest.raises(DataError, match=r"part 'p1' of the mixture gave 'tokens' as float32\[3\] where float32\[2\]"):
        source.read(np.array([0, 9]))


def test_damaged_first_samples_do_not_keep_it_from_opening() -> None:
    source = mixed(Numbered(0, 5, bad=(0, 1)), Numbered(1, 5))
    assert source.read(np.array([2, 5]))["tokens"][:, 0].tolist() == [2, 1000]
    with pytest.raises(BadRecordError):
        source.read(np.array([5, 1]))
    with pytest.raises(DataError, match=r"none of the first samples of part 'p0'.*torn"):
        mixed(Numbered(0, 2, bad=(0, 1)), Numbered(1, 5))


def text_part(path: Path, **keys: Any) -> dict[str, Any]:
    return {"weight": 1, "data": {"name": "text", "path": str(path), "seq_len": 4, **keys}}


def test_it_opens_from_a_job(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(41)))
    (tmp_path / "b.txt").write_bytes(bytes(range(100, 141)))
    parts = {"a": text_part(tmp_path / "a.txt", eval_fraction=0), "b": text_part(tmp_path / "b.txt", eval_fraction=0.2)}
    config = MixtureConfig(parts=parts)
    train, held_out = open_source(config, "train", 0), open_source(config, "eval", 0)
    assert held_out is not None
    assert (len(train), len(held_out)) == (10 + 8, 2)
    assert train.read(np.array([10, 1]))["tokens"][:, 0].tolist() == [100, 4]
    assert held_out.read(np.array([0]))["tokens"][0, 0] == 132
    assert open_source(MixtureConfig(parts={"a": parts["a"]}), "eval", 0) is None


def test_an_error_of_a_part_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"part 'a' of the mixture: data.path = .* does not exist") as caught:
        open_source(MixtureConfig(parts={"a": text_part(tmp_path / "nowhere")}), "train", 0)
    assert caught.value.fix
