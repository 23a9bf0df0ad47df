"""Only bytes that are the same, and that are still there, are referred to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from closeranks.checkpoint.format.manifest import folder_name
from closeranks.checkpoint.save.references import (
    existing_references,
    missing_files,
    read_base_manifest,
    reference_candidates,
)
from closeranks.storage.local import LocalStorage
from tests.checkpoint.saving import order, save, settings


def test_a_place_without_checkpoints_has_no_base(tmp_path: Path) -> None:
    assert read_base_manifest(LocalStorage(tmp_path)) is None


def test_the_base_is_what_latest_names(tmp_path: Path) -> None:
    save(order(1), settings(tmp_path))
    latest = (tmp_path / "latest").read_bytes()
    save(order(2), settings(tmp_path))
    (tmp_path / "latest").write_bytes(latest)
    base = read_base_manifest(LocalStorage(tmp_path))
    assert base is not None
    assert base.name == folder_name(1)


def test_everything_that_costs_nothing_must_be_equal(tmp_path: Path) -> None:
    save(order(1), settings(tmp_path))
    base = read_base_manifest(LocalStorage(tmp_path))
    assert base is not None
    chunk = order(1)[0].chunks[0]
    assert list(reference_candidates(base, [chunk])) == [0]
    piece = replace(chunk.piece, flat=(0, 1))
    for other in ({"crc32c": chunk.crc32c ^ 1}, {"dtype": "int32"}, {"section": "optimizer"}, {"piece": piece}):
        assert reference_candidates(base, [replace(chunk, **other)]) == {}


def test_a_reference_names_the_folder_that_holds_the_bytes(tmp_path: Path) -> None:
    for step in (1, 2):
        save(order(step), settings(tmp_path))
    storage = LocalStorage(tmp_path)
    base = read_base_manifest(storage)
    assert base is not None
    assert base.name == folder_name(2)
    found = reference_candidates(base, order(2)[0].chunks)
    files = {entry.chunk.key: entry.file.partition("/")[0] for entry in found.values()}
    assert files == {"frozen.weight": folder_name(1), "weight": folder_name(2), "bias": folder_name(2)}
    assert existing_references(storage, found) == found


def test_files_that_are_gone_or_short_are_named(tmp_path: Path) -> None:
    save(order(1), settings(tmp_path))
    storage = LocalStorage(tmp_path)
    base = read_base_manifest(storage)
    assert base is not None
    found = reference_candidates(base, order(1)[0].chunks)
    path = next(iter(found.values())).file
    assert missing_files(found.values(), storage.size) == []
    data = (tmp_path / path).read_bytes()
    (tmp_path / path).write_bytes(data[:-1])
    assert missing_files(found.values(), storage.size) == [path]
    assert existing_references(storage, found) == {}
    (tmp_path / path).unlink()
    assert missing_files(found.values(), storage.size) == [path]
