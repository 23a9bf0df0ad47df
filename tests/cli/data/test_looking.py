"""``closeranks data verify``, ``stats`` and ``show`` on what a build wrote, and on other formats."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from closeranks.cli.data.dataset_check import check_dataset
from closeranks.data.files.open import open_files
from closeranks.data.formats.record_index import index_file
from closeranks.data.formats.record_index.saved_index import IndexLocation
from closeranks.data.formats.records.jsonl import JsonlRecords
from tests.cli.data.calling import data
from tests.data.building.material import json_lines, png, rows, tar_bytes, tiny_tokenizer
from tests.data.files.conftest import as_nobody


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of tokens by byte and by tokenizer, of records, and a tar."""
    folder = tmp_path_factory.mktemp("made")
    written = [*rows(300), rows(300)[5], rows(300)[5], rows(300)[9]]
    (folder / "a.jsonl").write_bytes(json_lines(written))
    tokenizer = tiny_tokenizer(folder / "tokenizer.json")
    for number in range(4):
        path = folder / "photos" / "cats" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number % 3))
    (folder / "a.tar").write_bytes(tar_bytes("w", 10))
    one = ("--processes", 1)
    assert data("build", folder / "a.jsonl", "--out", folder / "bytes", "--shard-size", "8kB", *one).code == 0
    assert data("build", folder / "a.jsonl", "--out", folder / "bpe", "--tokenizer", tokenizer, *one).code == 0
    assert data("build", folder / "photos", "--out", folder / "records", "--kind", "records", *one).code == 0
    return folder


def job(folder: Path, table: str) -> Path:
    path = folder / "job.toml"
    train = "[train]\nsteps = 5\nglobal_batch = 12\nmicro_batch = 2\n"
    path.write_text(f'[model]\nname = "llama"\npreset = "tiny"\n{table}\n{train}')
    return path


# verify


def test_sound_shards(made: Path) -> None:
    said = data("verify", made / "bytes")
    assert (said.code, said.err) == (0, "")
    assert "303 documents: all sound" in said.out


def test_a_flipped_bit_is_named_with_its_file_and_samples(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    out.mkdir()
    for path in (made / "bytes").glob("[!.]*"):
        (out / path.name).write_bytes(path.read_bytes())
    victim = sorted(out.glob("*.crs"))[1]
    content = bytearray(victim.read_bytes())
    content[4096 + 100] ^= 4
    victim.write_bytes(content)
    said = data("verify", out)
    assert said.code == 1
    assert f"DAMAGED  '{victim}', byte " in said.out
    assert "are affected" in said.out
    told = json.loads(data("verify", out, "--json").out)
    assert not told["is_sound"]
    assert told["findings"][0]["first"] < told["findings"][0]["last"]


def test_other_formats_are_read_whole(made: Path, tmp_path: Path) -> None:
    said = data("verify", made / "a.tar")
    assert said.code == 0
    assert "10 records: all sound" in said.out
    (tmp_path / "b.jsonl").write_bytes(json_lines(rows(3)) + b"{broken\n" + json_lines(rows(2)))
    said = data("verify", tmp_path / "b.jsonl")
    assert said.code == 1
    assert "b.jsonl" in said.out
    assert "record 3" in said.out
    assert "not JSON: expecting property name" in said.out
    assert "at character 1 of the record (record 3)" in said.out


def test_images_that_are_none_are_named(made: Path, tmp_path: Path) -> None:
    said = data("verify", made / "photos")
    assert (said.code, said.err) == (0, "")
    assert "4 records: all sound (every record read, 4 images decoded" in said.out
    contents = {"a": b"", "b": png(1)[:-60], "c": b"no image at all", "d": png(2)}
    for name, content in contents.items():
        (tmp_path / f"{name}.png").write_bytes(content)
    said = data("verify", tmp_path)
    assert said.code == 1
    assert f"DAMAGED  '{tmp_path}/a.png', byte 0: field 'image' is empty (record 0)" in said.out
    assert "b.png', byte 0: field 'image' is a damaged image: " in said.out
    assert "c.png', byte 0: field 'image' is not a readable image (record 2)" in said.out
    assert "3 damaged" in said.out
    assert "BytesIO" not in said.out


def test_what_may_not_be_read_is_not_damaged(made: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for path in (made / "bytes").glob("[!.]*"):
            (folder / path.name).write_bytes(path.read_bytes())
        for closed in ("shard-00000-00000.crs", "dataset.json"):
            (folder / closed).chmod(0)
            with as_nobody():
                said = data("verify", folder)
            assert (said.code, said.out) == (2, "")
            assert closed in said.err
            assert "ermission denied" in said.err


@pytest.mark.parametrize("verb", ["verify", "stats", "show 0"])
def test_nothing_there(verb: str, tmp_path: Path) -> None:
    said = data(*verb.split(), tmp_path / "missing")
    assert said.code == 2
    assert "there is no file or folder" in said.err
    assert "data.path" not in said.err


def test_damage_in_the_part_of_an_index_that_opening_does_not_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jsonl").write_bytes(b"{}\n" * 300_000)
    monkeypatch.setattr(index_file, "FULL_CHECK_BYTES", 0)
    monkeypatch.setattr(index_file, "NUM_DRAWN", 0)
    index = JsonlRecords(open_files(str(tmp_path / "d")), IndexLocation()).indexes[0]
    content = bytearray(index.path.read_bytes())
    content[(3 << 20) // 2] ^= 1  # in the second of three blocks
    index.path.write_bytes(content)
    proof = check_dataset(str(tmp_path / "d"), "", lambda done, total: None)
    assert [finding.file for finding in proof.findings] == [str(index.path)]
    assert "is damaged: bytes" in proof.findings[0].text
    assert "Remove it: it is built again" in proof.findings[0].text


# stats


def test_counts_lengths_and_duplicates(made: Path, tmp_path: Path) -> None:
    said = data("stats", made / "bytes", "--json", "--seq-len", 64)
    (told,) = json.loads(said.out)
    lengths = [len(str(row["text"]).encode()) for row in [*rows(300), rows(300)[5], rows(300)[5], rows(300)[9]]]
    assert (told["num_documents"], told["num_tokens"]) == (303, sum(lengths))
    assert (told["lengths"]["min"], told["lengths"]["max"]) == (min(lengths), max(lengths))
    assert told["lengths"]["median"] == sorted(lengths)[151]
    assert told["duplicates"]["num_repeated"] == 3
    assert told["duplicates"]["most"] == 3
    assert told["duplicates"]["first_copies"] == [300, 301, 302]
    assert told["text_bytes"] == sum(lengths)
    assert told["packed"]["num_windows"] == (sum(lengths) - 1) // 64
    assert 0.5 < told["packed"]["efficiency"] <= 1.0
    said = data("stats", made / "bytes")
    assert "3 equal an earlier one, 0.99%" in said.out
    assert "303 documents" in said.out


def test_a_picture_is_drawn(made: Path, tmp_path: Path) -> None:
    said = data("stats", made / "bpe", "--picture", tmp_path / "lengths.png")
    assert said.code == 0
    with Image.open(tmp_path / "lengths.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert (pixels == (0x2B, 0x6C, 0xB0)).all(axis=1).sum() > 1000  # bars
    assert data("stats", made / "bpe", "--picture", tmp_path / "no" / "x.png").code == 2
    assert data("stats", made / "bpe", "--picture", tmp_path / "x.jpg").code == 2


def test_records_are_compared_by_content(made: Path) -> None:
    (told,) = json.loads(data("stats", made / "records", "--json").out)
    assert (told["kind"], told["num_records"]) == ("records", 4)
    assert told["lengths"]["unit"] == "bytes"


def test_records_that_cannot_be_read_are_told_and_found(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(json_lines(rows(3)) + b"{broken\n" + json_lines(rows(2)))
    said = data("stats", tmp_path / "b.jsonl")
    assert said.code == 1
    assert "1 records could not be read" in said.out
    told = data("stats", tmp_path / "b.jsonl", "--json")
    assert (told.code, json.loads(told.out)[0]["num_bad"]) == (1, 1)


def test_the_index_alone(made: Path) -> None:
    said = data("stats", made / "bytes", "--fast")
    assert said.code == 0
    assert "duplicates" not in said.out


def test_the_parts_of_a_mixture(made: Path, tmp_path: Path) -> None:
    table = f"""
[data]
name = "mixture"
[data.parts.web]
weight = 3
[data.parts.web.data]
name = "tokens"
path = "{made / "bytes"}"
seq_len = 32
[data.parts.code]
weight = 1
[data.parts.code.data]
name = "tokens"
path = "{made / "bytes"}"
seq_len = 32
"""
    said = data("stats", job(tmp_path, table))
    assert said.code == 0
    assert "web (" in said.out
    assert "code (" in said.out
    assert "of 32 tokens:" in said.out
    shown = data("show", 6, job(tmp_path, table))
    assert shown.code == 0
    assert "part     web: its sample " in shown.out


# show


def test_a_document_as_text(made: Path) -> None:
    said = data("show", 7, made / "bytes")
    assert said.code == 0
    assert "document 7 of 303" in said.out
    assert str(rows(300)[7]["text"]) in said.out
    assert "shard-" in said.out


def test_a_tokenizer_makes_text_of_ids(made: Path) -> None:
    plain = data("show", 7, made / "bpe")
    assert str(rows(300)[7]["text"]) not in plain.out
    said = data("show", 7, made / "bpe", "--tokenizer", made / "tokenizer.json")
    assert f"{rows(300)[7]['text']}<|endoftext|>" in said.out


def test_images_are_described_and_saved(made: Path, tmp_path: Path) -> None:
    said = data("show", 1, made / "records", "--save", tmp_path / "out")
    assert said.code == 0
    assert "PNG 8x8 RGB" in said.out
    assert png(1) in [path.read_bytes() for path in (tmp_path / "out").iterdir()]


def test_a_position_of_a_job(made: Path, tmp_path: Path) -> None:
    from closeranks.data.sampling.permutation import sample_indices

    table = f'[run]\nseed = 3\n[data]\nname = "tokens"\npath = "{made / "bytes"}"\nseq_len = 32'
    told = json.loads(data("show", 40, job(tmp_path, table), "--json").out)
    stream = "".join(str(row["text"]) for row in [*rows(300), rows(300)[5], rows(300)[5], rows(300)[9]]).encode()
    count = (len(stream) - 1) // 32
    sample = int(sample_indices(np.array([40]), count, 3)[0])
    assert (told["sample"], told["of"], told["epoch"]) == (sample, count, 0)
    assert told["read at"] == "step 4, micro-batch 2"
    assert told["text"]["tokens"] == stream[sample * 32 : sample * 32 + 33].decode(errors="replace")
    later = json.loads(data("show", count + 5, job(tmp_path, table), "--json").out)
    assert later["epoch"] == 1
    assert later["read at"].startswith("never: the run ends after 60 positions")


def test_overrides_change_the_sample(made: Path, tmp_path: Path) -> None:
    table = f'[data]\nname = "tokens"\npath = "{made / "bytes"}"\nseq_len = 32'
    one = json.loads(data("show", 0, job(tmp_path, table), "run.seed=1", "--json").out)
    other = json.loads(data("show", 0, job(tmp_path, table), "run.seed=2", "--json").out)
    assert one["sample"] != other["sample"]


def test_a_number_beyond_the_end(made: Path) -> None:
    said = data("show", 303, made / "bytes")
    assert said.code == 2
    assert "Name one of 0 to 302" in said.err


def test_without_a_job_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (("show", 1), ("assign", "-n", 2), ("stats",)):
        said = data(*words)
        assert said.code == 2
        assert "there is no job.toml in this folder" in said.err
