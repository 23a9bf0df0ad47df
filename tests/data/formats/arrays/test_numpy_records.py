"""Arrays are records or tokens by their rows, mapped, and never unpickled."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from closeranks.core.errors import DataError
from closeranks.data.files.open import open_files
from closeranks.data.formats.arrays.numpy_records import NumpyRecords
from closeranks.data.formats.arrays.numpy_tokens import NumpyTokens
from closeranks.data.formats.record_index.saved_index import IndexLocation


class Trap:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def write(root: Path, **arrays: npt.NDArray[Any]) -> Path:
    root.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(root / f"{name}.npy", array)
    return root


def records_of(root: Path) -> NumpyRecords:
    return NumpyRecords(open_files(str(root)), IndexLocation())


def tokens_of(root: Path, field: str = "") -> NumpyTokens:
    return NumpyTokens(open_files(str(root)), IndexLocation(), field)


def test_arrays_of_one_length_are_fields(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(7, 2, 3)).astype(np.float32), np.arange(7, dtype=np.int16)
    records = records_of(write(tmp_path, x=x, y=y, name=np.array([f"n{i}" for i in range(7)])))
    found = records.read(np.array([6, 2, 2]))
    for row, number in zip(found, (6, 2, 2), strict=True):
        np.testing.assert_array_equal(row["x"], x[number])
        assert row["x"].dtype == np.float32
        assert (row["y"].shape, row["y"].dtype, int(row["y"])) == ((), np.int16, number)
        assert row["name"] == f"n{number}"
    assert len(records) == 7
    assert records.block == 0


@given(
    array=hnp.arrays(
        st.sampled_from([np.int32, np.float64, np.uint8, np.bool_]),
        hnp.array_shapes(min_dims=1, max_dims=3, max_side=8),
    ),
    cuts=st.lists(st.integers(0, 8), max_size=3),
    fortran=st.booleans(),
)
def test_pieces_are_one_array(
    array: npt.NDArray[Any], cuts: list[int], fortran: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("npy")
    for number, piece in enumerate(np.split(array, sorted(min(cut, len(array)) for cut in cuts))):
        np.save(root / f"x-{number}.npy", np.asfortranarray(piece) if fortran else piece)
    records = records_of(root)
    order = np.random.default_rng(0).permutation(len(array))
    found = records.read(order)
    np.testing.assert_array_equal(np.array([row["x"] for row in found]).reshape(array.shape), array[order])


def test_pieces_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    root = write(tmp_path, **{f"x_{n}": np.array([n]) for n in (10, 9, 2)})
    assert [int(row["x"]) for row in records_of(root).read(np.arange(3))] == [2, 9, 10]
    assert records_of(root).files_of(np.array([2, 0])) == ["x_10.npy", "x_2.npy"]
    assert str(records_of(root).where(2)) == f"'{root / 'x_10.npy'}', row 0"


def test_a_number_without_a_dash_belongs_to_the_name(tmp_path: Path) -> None:
    records = records_of(write(tmp_path, x1=np.arange(2), x2=np.arange(2)))
    assert sorted(records.read(np.array([0]))[0]) == ["x1", "x2"]


def test_unequal_fields_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="field 'y' has 4 rows, 'x' 3"):
        records_of(write(tmp_path, x=np.arange(3), y=np.arange(4)))


def test_pieces_must_agree(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x-1.npy' has rows of float64\[\], .*x-0.npy' of int64\[\]"):
        records_of(write(tmp_path, **{"x-0": np.arange(3), "x-1": np.zeros(3)}))


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    trapped = tmp_path / "trapped"
    root = write(tmp_path / "d", x=np.array([Trap(trapped)], dtype=object))
    with pytest.raises(DataError, match=r"x\.npy' holds Python objects \(byte 0\).*unpickled"):
        records_of(root)
    with pytest.raises(DataError, match="unpickled"):
        tokens_of(root)
    assert not trapped.exists()


def test_a_pickle_under_another_name_is_no_array(tmp_path: Path) -> None:
    trapped = tmp_path / "trapped"
    root = tmp_path / "d"
    root.mkdir()
    (root / "x.npy").write_bytes(pickle.dumps(Trap(trapped)))
    with pytest.raises(DataError, match="not a NumPy array"):
        records_of(root)
    assert not trapped.exists()


def test_a_short_file_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path, x=np.arange(100))
    data = (root / "x.npy").read_bytes()
    for keep, reason in ((len(data) - 1, "truncated: 928 bytes should be there"), (20, "a NumPy"), (0, "a NumPy")):
        (root / "x.npy").write_bytes(data[:keep])
        with pytest.raises(DataError, match=reason):
            records_of(root)


def test_archives_are_to_be_unpacked(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    with pytest.raises(DataError, match=r"a\.npz' is an archive.*unzip a\.npz"):
        records_of(tmp_path)


@pytest.mark.parametrize("array", [np.array(3), np.zeros(2, dtype=[("a", "i4"), ("b", "f4")])])
def test_what_has_no_rows_of_values_is_refused(tmp_path: Path, array: npt.NDArray[Any]) -> None:
    with pytest.raises(DataError, match=r"x\.npy' cannot be read \(byte 0\)"):
        records_of(write(tmp_path, x=array))


@given(
    pieces=st.lists(st.lists(st.integers(0, 60_000), max_size=20), min_size=1, max_size=4),
    length=st.integers(1, 12),
    data=st.data(),
)
def test_windows_cross_files(
    pieces: list[list[int]], length: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("tokens")
    for number, piece in enumerate(pieces):
        np.save(root / f"t-{number}.npy", np.array(piece, np.uint16))
    stream = np.concatenate([np.array(piece, np.uint16) for piece in pieces])
    tokens = tokens_of(root)
    assert tokens.num_tokens == len(stream)
    np.testing.assert_array_equal(tokens.ends, np.cumsum([len(piece) for piece in pieces]))
    if len(stream) < length:
        return
    starts = np.array(data.draw(st.lists(st.integers(0, len(stream) - length), max_size=5)), np.int64)
    found = tokens.read(starts, length)
    assert (found.shape, found.dtype) == ((len(starts), length), np.uint16)
    for row, start in zip(found, starts, strict=True):
        np.testing.assert_array_equal(row, stream[start : start + length])
    touched = tokens.files_of(starts, length)
    assert len(touched) == len(set(touched))
    for start in starts.tolist():
        assert Path(tokens.where(start).file).name in touched


def test_rows_are_documents(tmp_path: Path) -> None:
    tokens = tokens_of(write(tmp_path, t=np.arange(12, dtype=np.int32).reshape(4, 3)))
    np.testing.assert_array_equal(tokens.ends, [3, 6, 9, 12])
    np.testing.assert_array_equal(tokens.read(np.array([2]), 5), [[2, 3, 4, 5, 6]])
    assert tokens.where(4).offset == 128 + 4 * 4


def test_ends_say_where_documents_end(tmp_path: Path) -> None:
    root = write(tmp_path, **{"t-0": np.arange(5), "t-0.ends": np.array([0, 2, 5]), "t-1": np.arange(3)})
    tokens = tokens_of(root)
    np.testing.assert_array_equal(tokens.ends, [0, 2, 5, 8])
    before = tokens.identity
    np.save(root / "t-0.ends.npy", np.array([0, 3, 5]))
    assert tokens_of(root).identity != before


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ([2, 1, 5], r"row 1 are wrong: it is below"),
        ([2, 4], "row 1 are wrong: the last should be 5"),
        ([], "the last should be 5"),
        ([2.0, 5.0], "not a list of integers"),
    ],
)
def test_wrong_ends_are_refused(tmp_path: Path, ends: list[float], reason: str) -> None:
    wrong = np.array(ends) if ends else np.empty(0, np.int64)
    with pytest.raises(DataError, match=rf"t\.ends\.npy', {reason}|{reason}"):
        tokens_of(write(tmp_path, **{"t": np.arange(5), "t.ends": wrong}))


def test_which_array_holds_the_tokens(tmp_path: Path) -> None:
    root = write(tmp_path, a=np.arange(3), b=np.arange(4))
    assert tokens_of(root, "b").num_tokens == 4
    with pytest.raises(DataError, match=r"several arrays: a, b.*data\.field"):
        tokens_of(root)
    with pytest.raises(DataError, match="no array 'c'"):
        tokens_of(root, "c")
    write(root, tokens=np.arange(9))
    assert tokens_of(root).num_tokens == 9


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros(3), "tokens are integers"),
        (np.zeros((2, 2, 2), np.int64), "3 dims"),
        (np.asfortranarray(np.zeros((3, 4), np.int64)), "column by column"),
    ],
)
def test_what_is_no_tokens(tmp_path: Path, array: npt.NDArray[Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        tokens_of(write(tmp_path, t=array))


def test_tokens_outside_are_refused(tmp_path: Path) -> None:
    tokens = tokens_of(write(tmp_path, t=np.arange(5)))
    for start in (-1, 3):
        with pytest.raises(DataError, match="there is no number"):
            tokens.read(np.array([start]), 3)


def test_pickled_stores_read_on(tmp_path: Path) -> None:
    root = write(tmp_path, x=np.arange(100_000))
    for store in (records_of(root), tokens_of(root)):
        assert len(pickle.dumps(store)) < 2000
    again = pickle.loads(pickle.dumps(tokens_of(root)))
    np.testing.assert_array_equal(again.read(np.array([7]), 2), [[7, 8]])
