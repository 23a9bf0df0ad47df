"""A seal that holds does not make a manifest sound: nothing in it may lead astray whoever acts on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.checkpoint.format import manifest_validation
from closeranks.checkpoint.format.manifest import CheckpointManifest, ChunkLocation, encode_manifest
from closeranks.checkpoint.format.manifest_validation import coverage_gap, read_manifest, validate_manifest
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece
from closeranks.storage.local import LocalStorage
from tests.checkpoint import making
from tests.checkpoint.cutting import cuts, shapes
from tests.checkpoint.making import Whole, a_state, filled

PATH = "/runs/a/checkpoints/step-00000040"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> CheckpointManifest:
    root = tmp_path_factory.mktemp("checkpoints")
    base = making.write(root, 20, a_state())
    return making.write(root, 40, {**a_state(), ("model", "mask"): Whole("bool", filled((9,), "bool", 77))}, base=base)


def test_a_sound_one_passes(manifest: CheckpointManifest) -> None:
    assert validate_manifest(encode_manifest(manifest), PATH).name == manifest.name


def entry_with(
    where: Callable[[ChunkLocation], bool], change: Callable[[ChunkLocation], ChunkLocation]
) -> Callable[[CheckpointManifest], CheckpointManifest]:
    def forge(manifest: CheckpointManifest) -> CheckpointManifest:
        found = next(entry for entry in manifest.entries if where(entry) and entry.chunk.num_bytes)
        entries = [change(entry) if entry is found else entry for entry in manifest.entries]
        return replace(manifest, entries=tuple(entries))

    return forge


def own(entry: ChunkLocation) -> bool:
    return "/" not in entry.file


def referring(entry: ChunkLocation) -> bool:
    return "/" in entry.file


def chunk(**fields: Any) -> Callable[[ChunkLocation], ChunkLocation]:
    return lambda entry: replace(entry, chunk=replace(entry.chunk, **fields))


def piece(**fields: Any) -> Callable[[ChunkLocation], ChunkLocation]:
    return lambda entry: replace(entry, chunk=replace(entry.chunk, piece=replace(entry.chunk.piece, **fields)))


def field(**fields: Any) -> Callable[[ChunkLocation], ChunkLocation]:
    return lambda entry: replace(entry, **fields)


def a_file(**fields: Any) -> Callable[[CheckpointManifest], CheckpointManifest]:
    return lambda manifest: replace(manifest, files=(replace(manifest.files[0], **fields), *manifest.files[1:]))


LIES = {
    "a file above the root": entry_with(referring, field(file="../../etc/passwd")),
    "a file beside it by way of a checkpoint": entry_with(referring, field(file="step-00000020/../../x")),
    "an absolute file": entry_with(referring, field(file="/etc/passwd")),
    "a hidden file": entry_with(referring, field(file="step-00000020/.lock")),
    "a folder that is no checkpoint": entry_with(referring, field(file="other/data.safetensors")),
    "a reference to itself": entry_with(referring, field(file="step-00000040/data-00000-of-00002.safetensors")),
    "a file it does not list": entry_with(own, field(file="data-00009-of-00010.safetensors")),
    "a file that is no text": entry_with(own, field(file=3)),
    "a listed file above its folder": a_file(name="../latest"),
    "a listed file with a folder": a_file(name="x/y"),
    "two files of one name": lambda manifest: replace(manifest, files=manifest.files + manifest.files[:1]),
    "a header larger than any": a_file(header_bytes=1 << 40, num_bytes=1 << 41),
    "a file smaller than its header": a_file(num_bytes=9),
    "a size below zero": a_file(num_bytes=-1),
    "an offset below zero": entry_with(referring, field(offset=-1)),
    "an offset in the header": entry_with(own, field(offset=0)),
    "an offset behind the end": entry_with(own, field(offset=1 << 40)),
    "an offset that is no integer": entry_with(own, field(offset=4096.0)),
    "more bytes than elements": entry_with(referring, chunk(num_bytes=1 << 50)),
    "an unknown type": lambda manifest: replace(
        manifest,
        entries=tuple(
            chunk(dtype="object")(entry) if entry.chunk.key == "embed.weight" else entry for entry in manifest.entries
        ),
    ),
    "a checksum of 33 bits": entry_with(referring, chunk(crc32c=1 << 32)),
    "a digest of other letters": entry_with(referring, field(blake3="x" * 64)),
    "a short digest": entry_with(referring, field(blake3="ab")),
    "a start outside": entry_with(referring, piece(start=(10**9, 0))),
    "a size below none": entry_with(referring, piece(size=(-7, -6))),
    "a different number of dims": entry_with(referring, piece(size=(7, 6, 1))),
    "a range outside": entry_with(referring, piece(flat=(10**6, 10**6 + 24))),
    "a range backwards": entry_with(referring, piece(flat=(5, 3))),
    "bytes claimed twice": lambda manifest: replace(
        manifest,
        entries=tuple(
            replace(entry, offset=next(one.offset for one in manifest.entries if one.file == entry.file))
            for entry in manifest.entries
        ),
    ),
    "a missing chunk": lambda manifest: replace(manifest, entries=manifest.entries[1:]),
    "a chunk twice": lambda manifest: replace(manifest, entries=(*manifest.entries, manifest.entries[0])),
    "full with references": lambda manifest: replace(manifest, is_full=True),
    "another step than its name": lambda manifest: replace(manifest, step=41),
    "no step": lambda manifest: replace(manifest, step="40"),
    "a name of another kind": lambda manifest: replace(manifest, name="../step-00000040"),
    "another folder": lambda manifest: replace(manifest, name="step-00000060", step=60),
    "no ranks": lambda manifest: replace(manifest, num_ranks=0),
    "a truth value for a number": lambda manifest: replace(manifest, num_ranks=True),
    "a tree of another kind": lambda manifest: replace(manifest, tree=[]),
    "no time": lambda manifest: replace(manifest, created="now"),
    "no metric": lambda manifest: replace(manifest, metric="low"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_sealed_lie_is_refused(manifest: CheckpointManifest, lie: str) -> None:
    forged = LIES[lie](manifest)
    with pytest.raises(CheckpointError, match="step-00000040"):
        validate_manifest(encode_manifest(forged), PATH)


def test_two_tensors_under_one_name_are_refused(manifest: CheckpointManifest) -> None:
    """The writer's encoding cannot say so; another writer's could."""
    data = encode_manifest(manifest)
    body = manifest_validation.decode_manifest(data, "here")
    first = body.entries[0]
    shape = (*first.chunk.piece.shape, 1)
    forged = piece(shape=shape, start=(0,) * len(shape), size=(*first.chunk.piece.size, 1))(first)
    with pytest.raises(ValueError, match="two dtypes or shapes"):
        manifest_validation._check_tensors(replace(body, entries=(forged, *body.entries[1:])))


def test_a_document_that_is_absurdly_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    making.write(tmp_path, 40, a_state())
    monkeypatch.setattr(manifest_validation, "DOCUMENT_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"a document cannot have .* bytes"):
        read_manifest(LocalStorage(tmp_path), "step-00000040")


@given(st.data(), shapes())
def test_every_cut_covers_and_none_without_a_piece_or_with_one_twice_does(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    pieces = [one for one in data.draw(cuts(shape)) if one.numel]
    assert coverage_gap(pieces) == ""
    number = data.draw(st.integers(0, len(pieces) - 1))
    assert "overlap" in coverage_gap([*pieces, pieces[number]])
    if len(pieces) > 1:
        assert "missing" in coverage_gap(pieces[:number] + pieces[number + 1 :])


def test_an_empty_tensor_is_covered() -> None:
    whole = Piece.whole("x", (0, 4))
    assert coverage_gap([whole, whole.shard(1, 0, 2)]) == ""
