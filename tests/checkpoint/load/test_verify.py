"""Whatever is wrong is named: checkpoint, file, tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.checkpoint.format.manifest import CheckpointManifest, ChunkLocation
from closeranks.checkpoint.load.catalogue import find_checkpoints
from closeranks.checkpoint.load.chunk_reader import ChunkReader
from closeranks.checkpoint.load.verify import VerifiedChunks, VerifyFinding, num_bytes_to_verify, verify, verify_all
from tests.checkpoint import making
from tests.checkpoint.making import Whole, a_state, by_ranges, filled


@pytest.fixture
def base(tmp_path: Path) -> CheckpointManifest:
    return making.write(tmp_path, 20, a_state(), cut=by_ranges)


@pytest.fixture
def manifest(tmp_path: Path, base: CheckpointManifest) -> CheckpointManifest:
    """Refers to all but one tensor of the base."""
    state = {**a_state(), ("model", "mask"): Whole("bool", filled((9,), "bool", 77))}
    return making.write(tmp_path, 40, state, cut=by_ranges, base=base)


def findings(root: Path) -> list[VerifyFinding]:
    return verify_all(find_checkpoints(str(root)))


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def test_sound_ones_have_no_findings_and_shared_bytes_are_read_once(
    tmp_path: Path, base: CheckpointManifest, manifest: CheckpointManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, int]] = []
    fetch = ChunkReader.read_into

    def counted(self: ChunkReader, entry: ChunkLocation, memory: memoryview) -> None:
        if entry.chunk.num_bytes:
            read.append((self.file_path(entry.file), entry.offset))
        fetch(self, entry, memory)

    monkeypatch.setattr(ChunkReader, "read_into", counted)
    catalogue, seen, progress = find_checkpoints(str(tmp_path)), VerifiedChunks(), list[int]()
    assert verify_all(catalogue, progress.append, seen) == []
    assert len(read) == len(set(read))
    assert manifest.referenced_files()
    distinct = base.num_bytes + a_state()["model", "mask"].values.nbytes
    assert seen.num_bytes == sum(progress) == num_bytes_to_verify(catalogue) == distinct


def test_damage_to_shared_bytes_is_named_for_every_checkpoint_that_needs_them(
    tmp_path: Path, base: CheckpointManifest, manifest: CheckpointManifest
) -> None:
    entry = next(one for one in base.entries if one.chunk.key == "head.weight")
    damage(tmp_path / "step-00000020" / entry.file, entry.offset)
    told = {(one.checkpoint, one.file, one.tensor) for one in findings(tmp_path)}
    assert told == {
        ("step-00000040", f"step-00000020/{entry.file}", "model/head.weight"),
        ("step-00000020", entry.file, "model/head.weight"),
    }
    assert "does not match its digest" in findings(tmp_path)[0].what


def test_one_damaged_chunk_does_not_hide_another(tmp_path: Path, base: CheckpointManifest) -> None:
    wanted = [one for one in base.entries if one.chunk.key in ("mask", "embed.weight") and one.chunk.num_bytes]
    for entry in wanted:
        damage(tmp_path / base.name / entry.file, entry.offset)
    assert len(findings(tmp_path)) == len(wanted) == 8


def test_files(tmp_path: Path, base: CheckpointManifest) -> None:
    first, second = (tmp_path / base.name / file.name for file in base.files)
    damage(first, 20)
    second.unlink()
    told = [str(one) for one in findings(tmp_path)]
    assert f"{base.name}: {first.name}: the header of {first.name} does not match its digest" in told
    assert any(f"{second.name} is missing" in text for text in told)
    assert all(one.is_damage for one in findings(tmp_path))


def forged(tmp_path: Path, manifest: CheckpointManifest, **fields: object) -> list[VerifyFinding]:
    """What is found where the manifest itself says something else of one chunk."""
    first = manifest.entries[0]
    making.publish(tmp_path, replace(manifest, entries=(replace(first, **fields), *manifest.entries[1:])))
    return findings(tmp_path)


def test_each_digest_is_compared(tmp_path: Path, base: CheckpointManifest) -> None:
    (only,) = forged(tmp_path, base, blake3="0" * 64)
    assert only.what.endswith("match their CRC32C but not their BLAKE3")
    (only,) = forged(tmp_path, base, digest_term=base.entries[0].digest_term ^ 1)
    assert only.what.endswith("do not match their layout-independent digest")
    assert only.tensor == "model/embed.weight"


def test_a_header_that_says_otherwise_than_the_manifest(tmp_path: Path, base: CheckpointManifest) -> None:
    first = base.entries[0]
    making.publish(tmp_path, replace(base, entries=tuple(_renamed(one, first.chunk.key) for one in base.entries)))
    told = [one.what for one in findings(tmp_path)]
    assert told
    assert all("its header has no model/renamed at byte" in what for what in told)


def _renamed(entry: ChunkLocation, key: str) -> ChunkLocation:
    if (entry.chunk.section, entry.chunk.key) != ("model", key):
        return entry
    piece = replace(entry.chunk.piece, name="renamed")
    return replace(entry, chunk=replace(entry.chunk, key="renamed", piece=piece))


def test_chunks_that_overlap(tmp_path: Path, base: CheckpointManifest) -> None:
    mask = [one for one in base.entries if one.chunk.key == "mask"]
    flat = {id(one): one.chunk.piece.flat for one in mask}
    assert list(flat.values()) == [(0, 2), (2, 4), (4, 6), (6, 9)]
    twice = {id(mask[1]): replace(mask[1].chunk.piece, flat=(0, 2))}
    entries = [
        replace(one, chunk=replace(one.chunk, piece=twice[id(one)])) if id(one) in twice else one
        for one in base.entries
    ]
    making.publish(tmp_path, replace(base, entries=tuple(entries)))
    assert any(one.tensor == "model/mask" and "are missing" in one.what for one in findings(tmp_path))


def test_notes_are_no_damage(tmp_path: Path, base: CheckpointManifest) -> None:
    (tmp_path / base.name / "part-00000-of-00002.json").write_text("left over")
    (tmp_path / "step-00000030").mkdir()
    (tmp_path / "step-00000030" / "data-00000-of-00002.safetensors").write_bytes(b"half")
    told = findings(tmp_path)
    assert [one.is_damage for one in told] == [False, False]
    assert verify(find_checkpoints(str(tmp_path / "step-00000030")).found[0])[0].is_damage is False


def test_a_lost_manifest_that_latest_names_is_damage(tmp_path: Path, base: CheckpointManifest) -> None:
    (tmp_path / base.name / "manifest.json").unlink()
    assert [one.is_damage for one in findings(tmp_path)] == [True]


def test_a_suspect_manifest_is_damage(tmp_path: Path, base: CheckpointManifest) -> None:
    making.publish(tmp_path, replace(base, metric=1.0), is_latest=False)
    (only,) = findings(tmp_path)
    assert only.is_damage
    assert "is not the one that latest was written for" in only.what
