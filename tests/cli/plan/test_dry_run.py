"""``closeranks plan dry-run``: what it prints, and how it refuses."""

from __future__ import annotations

import json

from tests.cli.calling import call
from tests.cli.commands import TINY

SMALL = ("model.num_layers=2", "train.global_batch=768")


def test_it_prints_both_figures_of_what_a_rank_holds_and_sends() -> None:
    done = call("plan", "dry-run", TINY, "--ranks", 256, 'layout="zero=1 tensor=2"', *SMALL)
    assert done.code == 0, done.err
    assert "data=128 zero=1 tensor=2, rank 0 of 256, a step of 2 micro-batches" in done.out
    for part in (
        "closed form", "dry run", "difference", "weights", "optimizer state", "peak",
        "reduce-scatter over 128 shard ranks", "all-gather over 2 tensor ranks",
    ):  # fmt: skip
        assert part in done.out, part
    assert "forming the groups of 256 ranks" in done.err


def test_json_is_all_of_standard_output() -> None:
    done = call("plan", "dry-run", TINY, "-n", 4, "pipeline=2", "--rank", 3, "--micro-batches", 1, "--json", *SMALL)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["num_ranks"], found["rank"], found["pipeline_rank"], found["num_micro"]) == (4, 3, 1, 1)
    assert found["memory_bytes"]["weights"]["difference"] == 0
    assert [row["operation"] for row in found["traffic"] if row["axis"] == "pipeline"] == ["send"]
    assert all(row["sent_bytes"]["closed_form"] == row["sent_bytes"]["dry_run"] > 0 for row in found["traffic"])
    assert found["notes"] == ["1 of 128 micro-batches were run, and the closed form is of so many."]


def test_what_cannot_be_run_is_refused_in_a_sentence() -> None:
    for words, sentence in (
        (("--rank", 8), "there is no rank 8 among 8."),
        (("tensor=3",), "tensor"),
        (("data=4",), "8"),
        (("missing.key=1",), "no such table"),
    ):
        done = call("plan", "dry-run", TINY, "--ranks", 8, *words)
        assert done.code == 2, words
        assert sentence in done.err, (words, done.err)
        assert "Traceback" not in done.err
