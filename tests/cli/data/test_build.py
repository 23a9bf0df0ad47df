"""``closeranks data build`` as a person calls it: what it says, and what it refuses."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.data.calling import data
from tests.cli.test_terminal import Terminal
from tests.data.building.material import contents, json_lines, rows, texts_folder, tiny_tokenizer

pytestmark = pytest.mark.world


def test_a_build_ends_with_a_summary(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(rows(200)))
    said = data("build", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--processes", 2, "--shard-size", "4kB")
    assert (said.code, said.err) == (0, "")
    num_bytes = sum(len(str(row["text"]).encode()) for row in rows(200))
    assert f"200 documents, {num_bytes:,} tokens in " in said.out
    assert "MB/s" in said.out
    assert len(said.out.splitlines()) == 1


def test_the_summary_as_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(rows(20)))
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer.json")
    said = data("build", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--tokenizer", tokenizer, "--json")
    told = json.loads(said.out)
    assert (told["kind"], told["num_documents"], told["num_shards"], told["is_old"]) == ("tokens", 20, 1, False)
    assert told["num_tokens"] < told["text_bytes"]


def test_again_says_that_there_is_nothing_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    words = ("build", tmp_path / "a.txt", "--out", tmp_path / "out")
    assert data(*words).code == 0
    said = data(*words)
    assert said.code == 0
    assert "built before from the same inputs" in said.out
    assert data(*words, "--overwrite").out.startswith(f"{tmp_path / 'out'}: 1 document, 5 tokens in 1 shard")


def test_skipped_records_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(rows(3)) + b"oops\n" * 30)
    said = data("build", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--on-bad", "skip")
    assert said.code == 0
    assert "30 records skipped:" in said.out
    assert "a.jsonl', byte " in said.out
    assert "and 10 more" in said.out


def test_files_that_are_left_out_are_told(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(json_lines(rows(30)))
    (tmp_path / "in" / "README.md").write_text("about")
    said = data("build", tmp_path / "in", "--out", tmp_path / "out")
    assert said.code == 0
    assert "is taken as jsonl; left out: 1 other file (README.md)" in said.err


def test_what_was_killed_goes_on_by_the_same_command(tmp_path: Path) -> None:
    texts_folder(tmp_path / "in", 10)
    words = ["data", "build", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--shard-size", "40kB"]
    command = [sys.executable, "-m", "closeranks", *words]
    env = {**os.environ, "CLOSERANKS_KILL_AT": "build.part_noted:2"}
    killed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -9
    said = data(*words[1:])
    assert said.code == 0
    assert "resuming: 2 of " in said.err
    assert "2 of " in said.out
    data("build", tmp_path / "in", "--out", tmp_path / "whole", "--shard-size", "40kB")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(rows(20_000)))
    terminal = Terminal("data", "build", "a.jsonl", "--out", "out", "--processes", 1, cwd=tmp_path)
    text = terminal.read()
    assert terminal.process.wait() == 0
    assert "building" in text
    assert "/s" in text
    assert "20,000 documents" in text


# What is refused: one sentence, exit 2, nothing written


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "a.jsonl").write_bytes(json_lines(rows(5)))
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    (tmp_path / "numbers.jsonl").write_text('{"text": 5}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "void.txt").write_text("")
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("a file")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["missing.txt", "--out", "out"], "there is no file or folder 'missing.txt'"),
        (["empty", "--out", "out"], "there are no files in"),
        (["", "--out", "out"], "the name of an input is empty"),
        (["a.txt", "--out", "out", "--tokenizer", "nope.json"], "there is no tokenizer file 'nope.json'"),
        (["a.txt", "--out", "out", "--tokenizer", "config.json"], "is not a tokenizer file"),
        (["a.txt", "--out", "full"], "is not empty: it holds mine.txt"),
        (["a.txt", "--out", "file"], "'file' is a file"),
        (["full", "--out", "full/shards"], "lies inside the input 'full'"),
        (["a.jsonl", "--out", "out", "--field", "body"], "it has no field 'body', but 'id', 'score', 'text'"),
        (["list.jsonl", "--out", "out"], "this one is a list"),
        (["numbers.jsonl", "--out", "out"], "its field 'text' holds a number, not text"),
        (["cut.jsonl.gz", "--out", "out"], "cut.jsonl.gz' is damaged"),
        (["bad.parquet", "--out", "out"], "bad.parquet"),
        (["a.txt", "--out", "out", "--shard-size", "much"], "--shard-size much is not a size"),
        (["a.txt", "--out", "out", "--eos", "300"], "--eos 300 lies outside the vocabulary of 256"),
        (["a.txt", "--out", "out", "--format", "jsonll"], "there is no format 'jsonll'"),
        (["a.txt", "--out", "s3://bucket/out"], "is not a folder on this host"),
        (["a.txt", "--out", " "], "is not a folder on this host"),
        (["void.txt", "--out", "out", "--kind", "records", "--split", "line"], "the inputs hold no documents"),
        (["a.txt", "--out", "out", "--kind", "pictures"], "pictures"),
    ],
)
def test_bad_input_is_one_sentence(
    place: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(place)
    said = data("build", *words)
    assert said.code == 2
    assert sentence in said.err.replace("\n", " ")
    assert "Traceback" not in said.err
    assert said.out == ""
    assert not (place / "out").exists()


def test_a_full_disk_is_told_and_the_build_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: it fails writes in the same place."""
    (tmp_path / "in.txt").write_bytes(b"x" * 300_000)
    command = [sys.executable, "-m", "closeranks", "data", "build", "in.txt", "--out", "out"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    done = subprocess.run(command, cwd=tmp_path, preexec_fn=limit, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "no space is left" in done.stderr
    assert "continues from the finished shards" in done.stderr
    assert data("build", tmp_path / "in.txt", "--out", tmp_path / "again").code == 0
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "", "'{path}' holds nothing to build from"),
        ("a.jsonl", "\n\n", "'{path}' holds nothing to build from"),
        ("a.jsonl", '{"text": ""}\n', "'{path}' holds nothing to build from"),
    ],
)
def test_inputs_that_hold_nothing_are_a_mistake(name: str, content: str, words: str, tmp_path: Path) -> None:
    path, out = tmp_path / name, tmp_path / "out"
    path.write_text(content)
    said = data("build", path, "--out", out)
    assert said.code == 2
    assert said.err.startswith(f"closeranks: {words.format(path=path)}")
    assert not (out / "dataset.json").exists()
    path.write_text('{"text": "something"}\n')
    assert data("build", path, "--out", out).code == 0


@pytest.mark.parametrize("content", ['[\n  {"text": "a"},\n  {"text": "b"}\n]\n', '[{"text": "a"}, {"text": "b"}]'])
def test_a_json_array_is_called_one_with_the_command_that_converts_it(content: str, tmp_path: Path) -> None:
    path = tmp_path / "it's.json"
    path.write_text(content)
    said = data("build", path, "--out", tmp_path / "out")
    assert said.code == 2
    assert f"'{path}' is one JSON array, not one object per line. Convert it: " in said.err
    command = said.err.partition("Convert it: ")[2].strip().replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert (tmp_path / "converted.jsonl").read_text() == '{"text": "a"}\n{"text": "b"}\n'
    assert data("build", tmp_path / "converted.jsonl", "--out", tmp_path / "out").code == 0
