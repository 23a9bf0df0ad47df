"""``closeranks plan validate``: the table per source, the closing line of JSON, and rows that cannot be used."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.calling import call
from tests.cli.commands import ROOT

TABLE = ROOT / "benchmarks" / "plan_runs.csv"


def result(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def test_our_table_is_predicted_source_by_source() -> None:
    done = call("plan", "validate", "--runs", TABLE)
    assert done.code == 0, done.err
    found = result(done.out)
    assert set(found) == {"name", "figures", "goal", "met"}
    figures = found["figures"]
    assert figures["rows"] == figures["predicted"] + figures["not"] == 444
    for part in ("VIA-Research/vTrain", "unseen", "one constant", "micro_batch is not published", "Spearman"):
        assert part in done.out
    memory = figures["memory"]
    assert (memory["published"], memory["predicted"]) == (14, 8)
    assert memory["mean"] < 0.15
    ran = memory["verdicts_of_runs_that_ran"]
    assert ran["fits"] > 200
    assert ran["does not fit"] == 0
    unseen = figures["dense 16-bit, unseen"]
    assert unseen["rows"] > 200
    assert unseen["mean"] <= 0.08
    assert unseen["p90"] <= 0.15
    of_sources = [one["mean"] for name, one in figures["sources"].items() if name.endswith("dense 16-bit")]
    assert max(of_sources) <= 0.15
    assert unseen["mean"] < 0.6 * unseen["constant_mean"], "better than one efficiency per GPU, chosen for these rows"
    without = figures["dense 16-bit, unseen, without constants set after a look"]
    assert without["rows"] == unseen["rows"]
    assert without["mean"] > unseen["mean"]
    sweeps = figures["sweeps"]
    assert sum(one["choices"] for one in sweeps) == 56
    assert figures["rank_correlation"] == pytest.approx(sum(one["spearman"] for one in sweeps) / 4, abs=1e-3)


def test_the_page_has_the_figures_that_it_prints() -> None:
    page = " ".join((ROOT / "docs" / "plan-validate.md").read_text().split())
    figures = result(call("plan", "validate", "--runs", TABLE, "--json").out)["figures"]
    unseen = figures["dense 16-bit, unseen"]
    without = figures["dense 16-bit, unseen, without constants set after a look"]
    names = {name for name in figures["sources"] if name.endswith("dense 16-bit")}
    worst = max(figures["sources"][name]["mean"] for name in names if figures["sources"][name]["rows"] > 1)
    memory, ran = figures["memory"], figures["memory"]["verdicts_of_runs_that_ran"]
    for told in (
        f"| {unseen['rows']} rows of 8 sources | {_row(unseen)} |",
        f"| the same without the constants that were set after unseen errors had been seen | {_row(without)} |",
        f"for each kind of GPU | {unseen['constant_mean']:.1%} |",
        f"The worst of the 8 sources has a mean error of {worst:.1%}",
        f"inside sweeps of layouts is [{figures['rank_correlation']:.2f}]",
        f"fp8 is {figures['dense fp8, unseen']['mean']:.0%} off on unseen sources",
        f"experts are {figures['experts, fit']['mean']:.0%} off",
        f"mean error is {memory['mean']:.1%}, with a bias of {memory['bias']:.1%}",
        f"{ran['fits']} are called `fits`, {ran['borderline']} `borderline` and none `does not fit`",
    ):
        assert told in page, told


def _row(one: dict[str, float]) -> str:
    return f"{one['mean']:.1%} | {one['p90']:.1%} | {one['bias']:+.1%}"


def test_rows_that_nobody_can_use_are_counted(tmp_path: Path) -> None:
    with TABLE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if "vTrain" in row["source"]][:4]
    broken = [{"gpu": "TPUv9"}, {"layers": "many"}, {"micro_batch": ""}, {"source": "", "hidden": "0"}, {"tp": "1e9"}]
    rows += [{**rows[0], **change} for change in broken]
    path = tmp_path / "mine.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    done = call("plan", "validate", "--runs", path, "--rows")
    assert done.code == 0, done.err
    assert (result(done.out)["figures"]["predicted"], result(done.out)["figures"]["not"]) == (4, 5)
    for reason in ("no 'TPUv9'", "layers is not a whole number", "micro_batch is not published", "do not divide"):
        assert reason in done.out
    alone = call("plan", "validate", "--runs", path, "--source", "nothing", "--json")
    assert result(alone.out)["figures"]["rows"] == 0
    assert result(alone.out)["met"] is False
    assert len(alone.out.splitlines()) == 1


def test_a_file_that_is_no_table_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("a,b\n1,2\n")
    for file, said in ((path, "have no column source"), (tmp_path / "none.csv", "cannot be read")):
        done = call("plan", "validate", "--runs", file)
        assert done.code == 2
        assert said in done.err
