"""Parts become a checkpoint only when they are all there, of one save, and make up the whole state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.checkpoint.format.data_file import SaveError
from closeranks.checkpoint.format.manifest import (
    MANIFEST,
    Chunk,
    ChunkLocation,
    DataFile,
    RankPart,
    decode_manifest,
    encode_part,
    part_name,
)
from closeranks.checkpoint.save import commit as commits
from closeranks.checkpoint.save.commit import commit, coverage_problem, gather_parts
from closeranks.checkpoint.save.save_task import SaveTask
from closeranks.core.pieces import Piece
from tests.checkpoint import saving
from tests.checkpoint.memory_storage import Killed, MemoryStorage


def entry(piece: Piece, dtype: str = "float32", num_bytes: int | None = None, file: str = "data") -> ChunkLocation:
    size = piece.numel * 4 if num_bytes is None else num_bytes
    return ChunkLocation(Chunk("model", piece.name, dtype, piece, size, 0), file, 0, "", 0)


def part(
    rank: int, entries: Sequence[ChunkLocation], save: str = "token-1", files: tuple[DataFile, ...] = ()
) -> RankPart:
    return RankPart(rank, 2, save, files, tuple(entries))


WHOLE = Piece.whole("w", (6, 5))


@given(st.data())
def test_any_cut_is_whole_and_no_piece_may_miss_or_come_twice(data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, 1))
    boxes = [WHOLE.shard(dim, index, 3) for index in range(3)]
    pieces: list[Piece] = []
    for box in boxes:
        if data.draw(st.booleans()):
            cut = data.draw(st.integers(1, box.numel - 1))
            pieces += [box.flattened(0, cut), box.flattened(cut, box.numel)]
        else:
            pieces.append(box)
    pieces = [piece for piece in pieces if piece.numel]
    pieces = data.draw(st.permutations(pieces))
    half = data.draw(st.integers(0, len(pieces)))

    def verdict(chosen: list[Piece]) -> str:
        return coverage_problem([part(0, map(entry, chosen[:half])), part(1, map(entry, chosen[half:]))])  # type: ignore[arg-type]

    assert verdict(pieces) == ""
    gone = data.draw(st.integers(0, len(pieces) - 1))
    if len(pieces) > 1:
        assert "is incomplete" in verdict(pieces[:gone] + pieces[gone + 1 :])
        swapped = pieces[:gone] + pieces[gone + 1 :] + [pieces[gone - 1]]
        assert "is incomplete" in verdict(swapped)
    assert "saved more than once" in verdict([*pieces, pieces[gone]])


def test_types_shapes_and_sizes_must_agree() -> None:
    top, bottom = WHOLE.shard(0, 0, 2), WHOLE.shard(0, 1, 2)
    assert coverage_problem([part(0, [entry(top)]), part(1, [entry(bottom, "bfloat16")])]) == (
        "model/w was saved with two dtypes or shapes"
    )
    other = Piece.whole("w", (3, 10)).shard(0, 0, 1)
    assert "two dtypes or shapes" in coverage_problem([part(0, [entry(top), entry(other)])])
    assert "sizes do not match" in coverage_problem([part(0, [entry(top), entry(bottom, num_bytes=7)])])


def test_empty_tensors_and_scalars_are_tensors() -> None:
    assert coverage_problem([part(0, [entry(Piece.whole("none", (0, 3)))])]) == ""
    assert coverage_problem([part(0, [entry(Piece.whole("one", ()))])]) == ""


def order(step: int = 1, num_ranks: int = 2) -> SaveTask:
    return saving.order(step, 0, num_ranks)[0]


def whole_parts(storage: MemoryStorage, save: str = "token-1") -> list[RankPart]:
    """Both halves with the files they name."""
    parts = []
    for rank in (0, 1):
        name = f"data-{rank:05d}-of-00002.safetensors"
        storage.files[f"step-00000001/{name}"] = b"x" * 100
        piece = entry(WHOLE.shard(0, rank, 2), file=name)
        parts.append(part(rank, [piece], save, (DataFile(name, 100, 8, 0),)))
    return parts


def publish(storage: MemoryStorage, one: RankPart) -> None:
    storage.publish(f"step-00000001/{part_name(one.rank, 2)}", encode_part(one), replace=True)


def test_parts_of_another_save_are_not_waited_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dead try left behind is passed over until this save's own part replaces it."""
    storage = MemoryStorage()
    first, second = whole_parts(storage)
    publish(storage, replace(second, save="token-0"))
    pauses: list[float] = []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 10:
            publish(storage, second)

    monkeypatch.setattr(commits.time, "sleep", sleep)
    assert gather_parts(storage, order(), first, 20.0, lambda: None) == (first, second)
    assert pauses[0] == 0.01
    assert pauses == sorted(pauses)
    assert max(pauses) == 0.25


def test_waiting_ends_with_its_time_or_when_it_is_told() -> None:
    storage = MemoryStorage()
    first, _ = whole_parts(storage)
    with pytest.raises(SaveError, match=r"no report from rank 1 in 0\.02 s, so step-00000001 stays unfinished"):
        gather_parts(storage, order(), first, 0.02, lambda: None)

    def give_up() -> None:
        raise SaveError("superseded")

    with pytest.raises(SaveError, match="superseded"):
        gather_parts(storage, order(), first, 60.0, give_up)


def test_a_failure_of_another_save_is_no_failure_of_this_one() -> None:
    storage = MemoryStorage()
    first, second = whole_parts(storage)
    publish(storage, second)
    failed = saving.order(1, 1, 2)[0]
    path = f"step-00000001/{commits.failure_name(1, 2)}"
    storage.publish(path, commits.encode_failure(replace(failed, save="token-0"), "long ago"), replace=True)
    assert gather_parts(storage, order(), first, 1.0, lambda: None) == (first, second)
    storage.publish(path, commits.encode_failure(failed, "no room"), replace=True)
    with pytest.raises(SaveError, match="rank 1 could not save: no room"):
        gather_parts(storage, order(), first, 1.0, lambda: None)


def test_committing_again_changes_nothing_and_another_save_is_refused() -> None:
    storage = MemoryStorage()
    parts = whole_parts(storage)
    made = commit(storage, order(), parts)
    before = dict(storage.files)
    assert commit(storage, order(), parts) == made
    assert storage.files == before
    with pytest.raises(SaveError, match="is already a checkpoint, from another save"):
        commit(storage, replace(order(), save="token-9"), parts)
    assert storage.files == before


def test_a_commit_cut_short_anywhere_is_finished_by_the_next() -> None:
    for num_changes in range(20):
        storage = MemoryStorage()
        parts = whole_parts(storage)
        for one in parts:
            publish(storage, one)
        storage.changes_left = num_changes
        try:
            commit(storage, order(), parts)
        except Killed:
            storage.changes_left = -1
            assert commit(storage, order(), parts).step == 1
            assert sorted(name for name in storage.files if "data" not in name) == [
                "latest",
                f"step-00000001/{MANIFEST}",
            ]
        else:
            assert num_changes == 4  # manifest, two parts, latest
            return
    raise AssertionError("it never came to an end")


def test_bytes_that_are_not_there_are_not_committed(tmp_path: Path) -> None:
    storage = MemoryStorage()
    parts = whole_parts(storage)
    storage.files["step-00000001/data-00001-of-00002.safetensors"] = b"x" * 99
    with pytest.raises(SaveError, match="differs in size from what rank 1 wrote"):
        commit(storage, order(), parts)
    storage = MemoryStorage()
    first, second = whole_parts(storage)
    lost = replace(second.entries[0], file="step-00000000/data-00001-of-00002.safetensors", offset=50)
    for there in (None, b"x" * 100):
        if there is not None:
            storage.files["step-00000000/data-00001-of-00002.safetensors"] = there
        with pytest.raises(SaveError, match="which rank 1 refers to, is missing or truncated"):
            commit(storage, order(), [first, replace(second, entries=(lost,))])
    assert f"step-00000001/{MANIFEST}" not in storage.files
    storage.files["step-00000000/data-00001-of-00002.safetensors"] = b"x" * 110
    commit(storage, order(), [first, replace(second, entries=(lost,))])
    made = decode_manifest(storage.files[f"step-00000001/{MANIFEST}"], "it")
    assert not made.is_full


def test_a_metric_that_is_no_number_is_none() -> None:
    storage = MemoryStorage()
    parts = whole_parts(storage)
    assert commit(storage, replace(order(), metric=float("nan")), parts).metric is None
