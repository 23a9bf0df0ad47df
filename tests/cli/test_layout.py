"""``closeranks layout``: what it lists and shows, and how it refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from closeranks.cli.layout_list import split_words, with_layout
from closeranks.run.job.job import layout_for, load_job
from tests.cli.calling import Said, call
from tests.cli.commands import TINY, closeranks


def refused(done: Said, *words: str) -> None:
    assert done.code == 2, done
    assert "Traceback" not in done.err + done.out, done.err
    assert done.err.startswith("closeranks: ")
    for word in words:
        assert word in done.err, (word, done.err)


@pytest.mark.parametrize("verb", ["ls", "show"])
def test_help_shows_examples(tmp_path: Path, verb: str) -> None:
    done = call("layout", verb, "--help", cwd=tmp_path)
    assert done.code == 0
    assert done.out.count(f"    closeranks layout {verb} ") >= 4


def test_the_listing_marks_the_job_and_says_what_columns_mean(tmp_path: Path) -> None:
    done = call("layout", "ls", TINY, "-n", 8, "layout.tensor=2", cwd=tmp_path)
    assert done.code == 0, done.err
    rows = [line for line in done.out.splitlines() if "=" in line and not line.startswith(("tiny", "Held"))]
    starred = [line for line in rows if line.startswith("*  ")]
    assert [line.split()[1:3] for line in starred] == [["data=4", "tensor=2"]]
    assert "tiny.toml on 8 ranks: 28 legal layouts; sizes in MiB" in done.out
    assert "Held by the fullest rank" in done.out
    assert "\x1b" not in done.out
    totals = [float(line.replace("*", "").split("=")[-1].split()[6]) for line in rows if line[0] == " "]
    assert totals == sorted(totals)


def test_refused_layouts_are_counted(tmp_path: Path) -> None:
    done = call("layout", "ls", TINY, "-n", 16, "model.num_kv_heads=2", "--all", cwd=tmp_path)
    assert "more are not legal for this model and batch" in done.out
    assert "by tensor (4 does not divide the model's 2 key-value heads)" in done.out


def test_a_job_that_no_layout_suits(tmp_path: Path) -> None:
    done = closeranks("layout", "ls", TINY, "-n", 11, cwd=tmp_path)
    assert done.code == 0
    assert "no layout of 11 ranks is legal" in done.out
    assert "11 data ranks share 8 micro-batches" in done.out


def test_the_listing_as_json(tmp_path: Path) -> None:
    done = call("layout", "ls", TINY, "-n", 4, "--json", "--hsdp", "--schedule", "zbv", cwd=tmp_path)
    read = json.loads(done.out)
    layouts = [row["layout"] for row in read["layouts"]]
    assert read["num_ranks"] == 4
    assert "data=4 zero=3 shard=2" in layouts
    assert "data=2 pipeline=2 schedule=zbv" in layouts
    assert [row["layout"] for row in read["layouts"] if row["is_job"]] == ["data=4"]
    assert all(row["fullest"]["total_bytes"] > 0 for row in read["layouts"])


def test_only_what_fits_and_the_least_traffic_first(tmp_path: Path) -> None:
    sizes = ["model.preset=8b", "train.precision=bf16", "train.global_batch=64", "train.micro_batch=1"]
    done = call("layout", "ls", TINY, "-n", 64, *sizes, "--fits", 40, "--sort", "traffic", "--json", cwd=tmp_path)
    rows = json.loads(done.out)["layouts"]
    assert rows
    assert all(row["fullest"]["total_bytes"] <= 40 * 2**30 for row in rows)
    sent = [sum(entry["sent_bytes"] for entry in row["busiest"]["traffic"]) for row in rows]
    assert sent == sorted(sent)
    told = call("layout", "ls", TINY, "-n", 64, *sizes, "--fits", 40, cwd=tmp_path).out
    assert "need more than 40 GiB a rank" in told
    assert "* is the job's own layout." in told


def test_a_layout_is_shown(tmp_path: Path) -> None:
    done = call("layout", "show", TINY, "tensor=2 pipeline=2", "-n", 8, "--picture", "mesh.png", cwd=tmp_path)
    assert done.code == 0, done.err
    for words in (
        "data=2 tensor=2 pipeline=2 on 8 ranks, 4 micro-batches a step on each data rank",
        "pipeline 1   stage 1: model.layers.4..7, model.norm, lm_head",
        "tensor    4 x 2    0,1  2,3  4,5  6,7",
        "all-gather of hidden states over 2 tensor ranks",
        "bubble 20.0%",
        "rank 0  F0",
        "picture: mesh.png",
    ):
        assert words in done.out, (words, done.out)
    assert (tmp_path / "mesh.png").read_bytes().startswith(b"\x89PNG")


def test_a_layout_is_shown_as_json(tmp_path: Path) -> None:
    done = call("layout", "show", TINY, "data=2 zero=3", "--json", cwd=tmp_path)
    read = json.loads(done.out)
    assert (read["layout"], read["num_ranks"], len(read["ranks"])) == ("data=2 zero=3", 2, 1)
    assert read["ranks"][0]["stages"]["0"][0] == "model.embed_tokens"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tensor=3", "-n", 8], ("layout.tensor", "The nearest legal layout is data=2 tensor=4.")),
        (["pipeline=16"], ("8 layers do not fill 16 stages", "The nearest legal layout is data=2 pipeline=8.")),
        (["data=3", "-n", 8], ("takes 3 workers, but 8", "The nearest legal layout is data=8.")),
        (["tensr=2"], ("'tensr=2' is not an axis", "Did you mean 'tensor'?")),
        (["pipeline=2 schedule=zbw"], ("there is no schedule 'zbw'", "Did you mean 'zbv'?")),
        (["context=2"], ("layout.context",)),
        (["tensor=2", "train.stepz=3"], ("train.stepz", "Did you mean")),
        (["pipeline=2", "--picture", "no/such/mesh.png"], ("there is no folder no/such",)),
        (["pipeline=2", "--picture", "mesh.jpg"], ("mesh.jpg", "PNG")),
    ],
)
def test_a_mistake_gets_one_answer(tmp_path: Path, arguments: list[object], words: tuple[str, ...]) -> None:
    refused(call("layout", "show", TINY, *arguments, cwd=tmp_path), *words)
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_ls_too(tmp_path: Path) -> None:
    refused(call("layout", "ls", TINY, "-n", 8, "--schedule", "zbw", cwd=tmp_path), "--schedule", "'zbv'")
    refused(call("layout", "ls", "none.toml", "-n", 8, cwd=tmp_path), "none.toml")
    negative = call("layout", "ls", TINY, "-n", 8, "--fits", -1, cwd=tmp_path)
    assert (negative.code, negative.out) == (2, "")
    assert "'--fits'" in negative.err


def test_layout_words_and_overrides_are_told_apart() -> None:
    words = ["data=2", "tensor=2 zero=1", "train.steps=3", 'data="seq_len=8"', 'layout="tensor=2"', "data.seq_len=4"]
    text, overrides = split_words(words)
    assert text == "data=2 tensor=2 zero=1"
    assert overrides == words[2:]


@pytest.mark.parametrize(
    ("text", "num_workers", "layout"),
    [
        ("", 8, "data=4 tensor=2"),
        ("pipeline=2", 8, "data=4 pipeline=2"),
        ("pipeline=2", 0, "pipeline=2"),
        ("data=2 pipeline=2", 8, "data=2 pipeline=2"),
        ("zero=3, data=4", 0, "data=4 zero=3"),
    ],
)
def test_the_text_is_the_whole_layout(text: str, num_workers: int, layout: str) -> None:
    job = load_job(Path(TINY), ["layout.tensor=2"]).value
    assert str(layout_for(with_layout(job, text, num_workers), num_workers or 1)) == layout


def test_where_nothing_fits_it_says_so_and_how_many_workers_would(tmp_path: Path) -> None:
    large = ["model.preset=13b", "train.precision=bf16", "train.global_batch=64", "train.micro_batch=1"]
    done = call("layout", "ls", TINY, "-n", 2, *large, "--fits", 40, cwd=tmp_path)
    assert done.code == 0, done.err
    assert re.search(
        r"None of these \d+ layouts fits into 40 GiB a rank: .* needs the least, [\d.]+ GiB, which is", done.out
    )
    (command,) = re.findall(r"The fewest that fit are \d+ workers, with .*: (closeranks layout ls .*)", done.out)
    again = call(*shlex.split(command)[1:], cwd=tmp_path)
    assert "None of these" not in again.out
    (number,) = re.findall(r"-n (\d+) --fits 40", command)
    fewer = call("layout", "ls", TINY, "-n", int(number) - 1, *large, "--fits", 40, "--json", cwd=tmp_path)
    read = json.loads(fewer.out)
    assert read["layouts"] == []
    assert read["fewest_workers"] == int(number)


def test_memory_for_copies_and_tensor_ranks_on_several_hosts(tmp_path: Path) -> None:
    def shown(*words: str) -> str:
        return call("layout", "show", TINY, *words, cwd=tmp_path).out

    assert "MiB a host of 4 workers (two of what a rank holds)" in shown("data=4")
    assert "(two of what a rank holds and two of a peer's)" in shown("data=4 zero=1")
    assert "none (elastic.enabled = false)" in shown("data=4", "elastic.enabled=false")
    crossing = shown("data=2 tensor=4", "--per-host", "2")
    assert "warning: the tensor axis crosses hosts: 4 ranks" in crossing
    assert "Use layout.tensor = 2 on hosts of 2 workers" in crossing
    assert "warning" not in shown("data=2 tensor=4", "--per-host", "4")


@pytest.mark.slow
def test_copies_take_the_memory_that_is_shown(tmp_path: Path) -> None:
    """Against what two workers reserve: each of up to four slots has a header and an index besides, in large pages."""
    told = call("layout", "show", TINY, "data=2 zero=1", "--json", cwd=tmp_path)
    most = max(json.loads(told.out)["host_copies_bytes"])
    small = ["layout=data=2 zero=1", "train.steps=4", "run.folder=run", "checkpoint.save=false"]
    done = closeranks("train", TINY, "-n", 2, *small, cwd=tmp_path)
    assert done.code == 0, done.err
    lines = map(json.loads, (tmp_path / "run" / "metrics" / "rank-00000.jsonl").read_text().splitlines())
    (kept, *_) = [line["bytes"] for line in lines if line["event"] == "snapshots"]
    assert most <= kept <= 1.05 * most + 4 * 2**21
