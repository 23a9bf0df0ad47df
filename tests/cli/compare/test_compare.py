"""Whole comparisons of a small job, with real workers."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from closeranks.core.events import RankLost, RanksClosed, RunStarted
from closeranks.lab.compare import namespaces
from closeranks.telemetry.run_log.recorder import read_events
from tests.cli.commands import Done, closeranks, marked_processes, started, wait_for_line
from tests.cli.compare.jobs import HEAD, KILLED, TWO, write

WORKERS = """
[[setting]]
name = "two workers"
[[setting]]
name = "one worker"
workers = 1
"""
PNG = b"\x89PNG"

PATIENCE_S = 500.0
"""Several runs of several processes each: on a busy machine they take minutes."""
pytestmark = [pytest.mark.world, pytest.mark.timeout(2 * PATIENCE_S)]


def compare(*words: object, cwd: Path) -> Done:
    return closeranks("compare", *words, cwd=cwd, timeout_s=PATIENCE_S)


def told(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "compare.json").read_text())
    return found


def num_params(run: Path) -> int:
    (started,) = [e for _, e in read_events(run / "metrics" / "rank-00000.jsonl") if isinstance(e, RunStarted)]
    return started.num_params


def test_a_comparison_from_its_file_to_its_recommendation(tmp_path: Path) -> None:
    file = write(tmp_path, HEAD + WORKERS)
    done = compare(file, "seeds=[3]", "price_per_worker_hour=36.0", cwd=tmp_path)
    assert (done.code, done.err, done.left_behind) == (0, "", [])
    assert re.search(r"^\[1/2\] two workers, seed 3: .* 12 steps, .* final loss", done.out, re.MULTILINE)
    out = tmp_path / "out"
    two, one = told(out)["settings"]
    (run,) = two["runs"]
    assert (run["seed"], run["state"], run["num_steps"], run["reason"]) == (3, "finished", 12, "")
    assert run["eval_loss"] == two["final"]["mean"] == pytest.approx(one["final"]["mean"], rel=1e-4)
    assert run["cost"] == pytest.approx(2 * 0.01 * run["seconds"])
    assert told(out)["recommendation"] in done.out
    assert told(out)["recommendation"] in (out / "compare.md").read_text()
    assert len(list(csv.DictReader((out / "runs.csv").read_text().splitlines()))) == 2
    assert [(out / name).read_bytes()[:4] for name in ("curves.png", "bars.png")] == [PNG, PNG]
    _check_bytes(two["runs"][0], one["runs"][0], tmp_path)
    _check_that_nothing_runs_again(file, tmp_path, run)


def _check_bytes(two: dict[str, Any], one: dict[str, Any], cwd: Path) -> None:
    """Two ranks send each other the gradients once there and once back: 2 (n-1)/n of them, each."""
    if namespaces.unavailable_reason(shaped=False):
        assert two["bytes_per_step"] is None
        return
    assert two["bytes_per_step"] == pytest.approx(2 * 4 * num_params(cwd / two["folder"]), rel=0.1)
    assert one["bytes_per_step"] < 0.01 * two["bytes_per_step"]


def _check_that_nothing_runs_again(file: Path, cwd: Path, before: dict[str, Any]) -> None:
    """Another target needs no run; the figures are those of before."""
    target = (math.log(4096) + before["final_loss"]) / 2
    again = compare(file, "seeds=[3]", f"target.value={target}", cwd=cwd)
    assert (again.code, again.out.count("(from before)")) == (0, 2)
    (run,) = told(cwd / "out")["settings"][0]["runs"]
    assert run["seconds"] == before["seconds"]
    assert 0 < run["seconds_to_target"] < run["seconds"]


def test_what_fails_or_diverges_is_a_row_with_its_reason(tmp_path: Path) -> None:
    wild = '[[setting]]\nname = "wild"\nset = ["optim.lr=1e30", "optim.clip=0.0"]\n'
    broken = '[[setting]]\nname = "broken"\nset.data.path = "nowhere.txt"\n'
    file = write(tmp_path, HEAD + '[[setting]]\nname = "plain"\n' + wild + broken)
    done = compare(file, "seeds=[0]", cwd=tmp_path)
    assert done.code == 0
    plain, wild_row, broken_row = told(tmp_path / "out")["settings"]
    assert (plain["num_sound"], wild_row["num_sound"], broken_row["num_sound"]) == (1, 0, 0)
    assert re.fullmatch(r"diverged: its (loss is|gradients are) not finite from step \d+", wild_row["reason"])
    assert broken_row["reason"].startswith("failed: ")
    assert "nowhere.txt" in broken_row["reason"]
    assert told(tmp_path / "out")["recommendation"].endswith("; wild diverged, broken failed.")
    alone = compare(write(tmp_path, HEAD + broken), "seeds=[0]", cwd=tmp_path)
    assert alone.code == 1
    assert "(from before)" in alone.out
    assert "No setting can be recommended: broken failed." in alone.out
    again = compare(write(tmp_path, HEAD + broken), "seeds=[0]", "--retry", cwd=tmp_path)
    assert (again.code, "(from before)" in again.out) == (1, False)


@pytest.mark.parametrize(
    ("signum", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "term")]
)
def test_an_interrupted_comparison_goes_on_where_it_stood(tmp_path: Path, signum: int, code: int, word: str) -> None:
    file, long = write(tmp_path), ("seeds=[0]", "budget.steps=40")
    with started("compare", file, *long, cwd=tmp_path) as (process, mark):
        wait_for_line(process, "[1/2] replicas, seed 0: ")
        second = tmp_path / "out" / "runs"
        assert process.stdout is not None
        while not list(second.glob("zero-1-*/run/metrics/rank-00000.jsonl")):
            assert process.poll() is None
        os.kill(process.pid, signum)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code
        assert word in err
        assert "continues with the missing runs" in err
        assert marked_processes(mark) == []
    assert len(list(second.glob("*/done.json"))) == 1
    done = compare(file, *long, cwd=tmp_path)
    assert (done.code, done.out.count("(from before)")) == (0, 1)
    assert [one["runs"][0]["num_steps"] for one in told(tmp_path / "out")["settings"]] == [40, 40]


def test_two_settings_with_two_seeds(tmp_path: Path) -> None:
    done = compare(write(tmp_path), cwd=tmp_path)
    assert done.code == 0
    replicas, zero = told(tmp_path / "out")["settings"]
    assert [run["seed"] for run in replicas["runs"]] == [0, 1]
    assert replicas["final"]["num"] == zero["final_gap"]["num"] == 2
    assert replicas["final"]["spread"] > 0
    assert abs(zero["final_gap"]["mean"]) < 1e-3, "the layout does not change what is learned"
    assert "±" in done.out


def test_a_budget_of_seconds_stops_every_run_in_time(tmp_path: Path) -> None:
    file = write(tmp_path, HEAD + TWO)
    done = compare(file, "seeds=[0]", "budget.steps=1000000", "budget.seconds=2.0", cwd=tmp_path)
    assert done.code == 0, done.out
    for setting in told(tmp_path / "out")["settings"]:
        (run,) = setting["runs"]
        assert run["state"] == "finished"
        assert 0.5 < run["seconds"] < 60.0  # the two seconds and a step, however long that takes here
        assert 1 < run["num_steps"] < 1000000


def test_outside_a_namespace_bytes_are_not_measured_and_that_is_said(tmp_path: Path) -> None:
    done = compare(write(tmp_path), "seeds=[0]", "budget.steps=2", "isolate=false", cwd=tmp_path)
    assert done.code == 0
    assert "Bytes are not measured: isolate = false." in done.out
    assert told(tmp_path / "out")["settings"][0]["bytes_per_step"] is None
    assert "Bytes were not measured: isolate = false." in (tmp_path / "out" / "compare.md").read_text()


SERVED = """
[[setting]]
name = "all-reduce"
[[setting]]
name = "stale servers"
workers = 3
set.sync.server = { count = 1, mode = "stale", bound = 1, every = 4 }
[[condition]]
name = "undisturbed"
"""


def test_every_setting_under_every_condition(tmp_path: Path) -> None:
    """A kill is a real one, of the last rank of each setting, and its cost is in the time of training."""
    file = write(tmp_path, HEAD + SERVED + KILLED)
    done = compare(file, "seeds=[0]", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    rows = told(tmp_path / "out")["settings"]
    assert [(row["condition"], row["name"], row["num_sound"]) for row in rows] == [
        ("undisturbed", "all-reduce", 1),
        ("undisturbed", "stale servers", 1),
        ("killed", "all-reduce", 1),
        ("killed", "stale servers", 1),
    ]
    lost = [
        [event.rank for _, event in read_events(tmp_path / row["runs"][0]["folder"] / "metrics" / "agent.jsonl")
         if isinstance(event, RankLost)]
        for row in rows
    ]  # fmt: skip
    assert lost == [[], [], [1], [2]]
    assert rows[0]["staleness"]["mean"] == 0 < rows[1]["staleness"]["mean"]
    assert rows[2]["final"]["mean"] == pytest.approx(rows[0]["final"]["mean"], rel=1e-6)
    (run,) = rows[2]["runs"]
    closed = [
        event.seconds for _, event in read_events(tmp_path / run["folder"] / "metrics" / "agent.jsonl")
        if isinstance(event, RanksClosed)
    ]  # fmt: skip
    assert run["seconds"] > closed[0]
    text = (tmp_path / "out" / "compare.md").read_text()
    assert ["## undisturbed" in text, "## killed" in text, "staleness" in text] == [True] * 3
    assert (tmp_path / "out" / "conditions.png").read_bytes()[:4] == PNG
