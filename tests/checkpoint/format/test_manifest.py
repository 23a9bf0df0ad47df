"""Manifests, parts and ``latest`` come back as they were, and names mean what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.checkpoint.format.documents import seal
from closeranks.checkpoint.format.manifest import (
    CheckpointManifest,
    LatestPointer,
    RankPart,
    as_reference,
    data_name,
    decode_latest,
    decode_manifest,
    decode_part,
    encode_latest,
    encode_manifest,
    encode_part,
    folder_name,
    parse_folder,
    part_name,
)
from closeranks.core.errors import CheckpointError
from tests.checkpoint import making
from tests.checkpoint.making import Whole, a_state, by_ranges, filled


@pytest.fixture
def manifest(tmp_path: Path) -> CheckpointManifest:
    base = making.write(tmp_path, 20, a_state(), cut=by_ranges)
    state = {**a_state(), ("model", "mask"): Whole("bool", filled((9,), "bool", 77))}
    return making.write(tmp_path, 40, state, cut=by_ranges, base=base, metric=0.1, tree={"deep": [{"a": 1.5}]})


def test_documents_come_back(manifest: CheckpointManifest) -> None:
    tensors = manifest.tensors()  # the encoding keeps the chunks of a tensor together
    ordered = tuple(entry for entries in tensors.values() for entry in entries)
    assert decode_manifest(encode_manifest(manifest), "here") == replace(manifest, entries=ordered)
    part = RankPart(1, 2, "5eed-1", manifest.files[1:], tuple(tensors["model", "mask"]))
    assert decode_part(encode_part(part), "here") == part
    latest = LatestPointer("step-00000040", "ab" * 32)
    assert decode_latest(encode_latest(latest), "here") == latest


def test_sums(manifest: CheckpointManifest) -> None:
    assert manifest.num_bytes == sum(whole.values.nbytes for whole in a_state().values())
    assert manifest.referenced_files() == {f"step-00000020/{data_name(rank, 2)}" for rank in (0, 1)}
    assert manifest.own_bytes == sum(file.num_bytes for file in manifest.files)
    assert manifest.digests()["other", "nothing"] == 0


def test_a_reference_is_never_moved_twice(manifest: CheckpointManifest) -> None:
    own = next(entry for entry in manifest.entries if "/" not in entry.file)
    referring = next(entry for entry in manifest.entries if "/" in entry.file)
    assert as_reference(own, manifest.name).file == f"{manifest.name}/{own.file}"
    assert as_reference(referring, manifest.name) is referring


def test_a_tensor_of_two_shapes_cannot_be_written(manifest: CheckpointManifest) -> None:
    first = manifest.entries[0]
    other = replace(first, chunk=replace(first.chunk, dtype="int32"))
    with pytest.raises(ValueError, match="two dtypes or shapes"):
        encode_manifest(replace(manifest, entries=(first, other)))


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_folder_names_are_read_back(step: int, part: int) -> None:
    assert parse_folder(folder_name(step, part)) == (step, part)
    assert parse_folder(folder_name(step, part) + "/") == (step, part)


@pytest.mark.parametrize(
    "name", ["step-40", "step-00000040-", "Step-00000040", "step-00000040.tmp", "", "latest", ".."]
)
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert parse_folder(name) is None


def test_file_names() -> None:
    assert data_name(3, 16) == "data-00003-of-00016.safetensors"
    assert part_name(3, 16) == "part-00003-of-00016.json"


@pytest.mark.parametrize("body", [{}, [], 3, None, {"name": "x", "tensors": 3}, "text"])
def test_sealed_nonsense_is_refused(body: object) -> None:
    for kind, decode in (("manifest", decode_manifest), ("part", decode_part), ("latest", decode_latest)):
        with pytest.raises(CheckpointError, match="here is damaged: its parts are inconsistent"):
            decode(seal(kind, body), "here")
