"""``closeranks plan job.toml --cluster``: what it prints, writes and draws, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from closeranks.run.job.job import load_job
from tests.cli.calling import call
from tests.cli.commands import FAST, ROOT, TINY, closeranks

BIG = ROOT / "examples" / "plans" / "llama-70b.toml"


def said(*words: object) -> str:
    done = call("plan", *words)
    assert done.code == 0, done.err
    return done.out


def figures(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*words, "--json"))
    return found


def refused(*words: object) -> str:
    done = call("plan", *words)
    assert done.code == 2
    assert done.out == ""
    assert "Traceback" not in done.err
    return done.err


def test_it_ranks_layouts_and_says_why() -> None:
    text = said(BIG, "--cluster", "64xh100", "--tokens", "300B", "--why", "--limit", 4)
    for part in (
        "llama-70b.toml on 64 H100", "on 8 hosts", "choices of", "layout", "recompute", "MFU", "fits", "goodput",
        "to 300B tokens, with goodput", "The job's own plan (data=64, ", "misses by", "the fastest of the layouts that",
        "slower, mostly", "time of a step", "compute: products", "memory of a device, GiB", "optimizer", "one change",
        "planned only", "$",
    ):  # fmt: skip
        assert part in text, part


def test_json_has_every_figure() -> None:
    found = figures(BIG, "--cluster", "64xh100", "--tokens", "300B", "--limit", 4)
    best = found["plans"][found["advised"]]
    assert sum(best["step_parts_s"].values()) == pytest.approx(best["step_s"])
    assert sum(best["memory_parts_bytes"].values()) == best["memory_bytes"]
    assert best["verdict"] == "fits"
    seconds = 300e9 / (1024 * 8192) * best["step_s"] / best["goodput"]
    assert best["days"] == pytest.approx(seconds / 86400)
    assert best["money"] == pytest.approx(best["days"] * 24 * 64 * found["cluster"]["price_per_hour"])
    assert 0.9 < best["goodput"] < 1


def test_options_narrow_the_search() -> None:
    kept = figures(TINY, "--cluster", "2xcpu", "--keep", "micro-batch", "--keep", "recompute", "--keep", "zero")
    assert {(plan["micro_batch"], plan["recompute"]) for plan in kept["plans"]} == {(3, "none")}
    only = figures(TINY, "layout.tensor=2", "--cluster", "2xcpu", "--keep", "layout")
    assert {plan["layout"] for plan in only["plans"]} == {"tensor=2"}
    assert figures(TINY, "--cluster", "2xcpu", "--margin", 0)["advised"] == 0


def test_two_layouts_side_by_side() -> None:
    job = ROOT / "examples" / "plans" / "gpt-175b.toml"
    words = ("data=64 tensor=4 pipeline=2 zero=1 recompute=full", "tensor=16 zero=3 recompute=full")
    text = said(job, "--cluster", "512xh100", "--compare", *words)
    assert "the tensor axis crosses hosts: 16 ranks" in text
    assert "Use tensor=8" in text
    assert "slower, mostly" in text
    assert words[0] in text
    first, second = json.loads(said(job, "--cluster", "512xh100", "--compare", *words, "--json"))
    assert (first["layout"], second["layout"]) == ("data=64 zero=1 tensor=4 pipeline=2", "data=32 zero=3 tensor=16")


def test_a_job_whose_tensor_axis_crosses_hosts_is_told() -> None:
    words = (
        ROOT / "examples" / "plans" / "gpt-175b.toml",
        "--cluster",
        "512xh100",
        "--keep",
        "layout",
        "layout.zero=3",
    )
    across = said(*words, "layout.data=32", "layout.tensor=16", "layout.pipeline=1")
    assert "In the job's own layout the tensor axis crosses hosts: 16 ranks" in across
    assert "crosses hosts" not in said(*words, "layout.data=64", "layout.tensor=8", "layout.pipeline=1")


def test_nothing_fits() -> None:
    text = said(BIG, "--cluster", "8xa100")
    assert "Nothing fits." in text
    assert "GiB too much" in text
    done = call("plan", BIG, "--cluster", "8xa100", "--out", "planned.toml")
    assert done.code == 2
    assert "no plan fits" in done.err


def test_the_job_it_writes_keeps_the_users_file(tmp_path: Path) -> None:
    out = tmp_path / "planned.toml"
    text = said(TINY, "train.steps=7", "--cluster", "2xcpu", "--out", out)
    assert f"closeranks train {out} -n 2" in text
    assert "# The smallest complete job" in out.read_text()
    job = load_job(out).value
    assert job.train.steps == 7
    assert job.layout.data * job.layout.tensor * job.layout.pipeline == 2
    before, after = tomllib.loads(Path(TINY).read_text()), tomllib.loads(out.read_text())
    changed = {key for key in before["train"] if before["train"][key] != after["train"][key]}
    assert changed <= {"steps", "micro_batch", "recompute", "precision", "compile"}
    assert before["data"] == after["data"]


@pytest.mark.world
def test_the_job_it_writes_trains(tmp_path: Path) -> None:
    out = tmp_path / "planned.toml"
    said(TINY, "--cluster", "2xcpu", "--out", out)
    done = closeranks("train", out, "-n", 2, *FAST, "run.folder=run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "run" / "config.json").exists()


def test_it_draws_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "out.png"
    assert f"picture: {picture}" in said(TINY, "--cluster", "4xcpu", "--picture", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["out.png"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((TINY,), "no cluster was named"),
        ((TINY, "--cluster", "8xh1000"), "h100"),
        ((TINY, "--cluster", "12xh100"), "do not fill hosts of 8"),
        ((TINY, "--cluster", "0xh100"), "0 devices"),
        ((TINY, "--cluster", "missing.toml"), "missing.toml"),
        ((TINY, "--cluster", "2xcpu", "--tokens", "many"), "no number of tokens"),
        ((TINY, "--cluster", "2xcpu", "--tokens", "100"), "less than one step, which takes 1,536"),
        ((TINY, "--cluster", "2xcpu", "--keep", "tensors"), "nothing that can be kept"),
        ((TINY, "--cluster", "2xcpu", "--compare", "tensro=2", "data=2"), "'tensro=2' is not an axis"),
        ((TINY, "--cluster", "2xcpu", "--compare", "data=2 recompute=some", "data=2"), "there is no 'some'"),
        ((TINY, "--cluster", "2xcpu", "--out", "nowhere/at/all.toml"), "no folder nowhere/at"),
        (("missing.toml", "--cluster", "2xcpu"), "missing.toml"),
    ],
)
def test_what_it_refuses(words: tuple[object, ...], sentence: str) -> None:
    assert sentence in refused(*words)


def test_a_link_without_bandwidth_is_refused(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('device = "h100"\nnum_devices = 16\n[inter_host]\nlatency_us = 5\ngb_per_s = 0\n')
    assert "above 0" in refused(TINY, "--cluster", cluster)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((TINY, "--cluster", "2xcpu", "--why"), "compute: products"),
        (("scale", TINY, "--cluster", "cpu", "--from", "1", "--to", "2"), "Strong scaling"),
        (("goodput", "--devices", "64", "--days", "1", "--seeds", "1"), "closing ranks"),
        (
            ("validate", "--runs", str(ROOT / "benchmarks" / "plan_runs.csv"), "--source", "litgpt"),
            "Lightning-AI/litgpt",
        ),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else "",
)
def test_planning_imports_no_torch(words: tuple[str, ...], shown: str) -> None:
    program = (
        "import sys; sys.argv = ['closeranks', 'plan', *sys.argv[1:]]\n"
        "from closeranks.cli.main import main\n"
        "main()\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_help_teaches() -> None:
    text = said("--help")
    assert "closeranks plan job.toml --cluster 64xh100" in text
    assert "--compare" in said("search", "--help")


def test_the_cheapest_number_of_devices() -> None:
    """With few samples in a step, many devices divide them badly."""
    words = (BIG, "train.global_batch=64", "--cluster", "256xh100", "--tokens", "100B", "--sort", "cost", "--limit", 1)
    found = figures(*words)
    assert found["cluster"]["num_devices"] < 256
    best = found["plans"][0]
    hurried = figures(*words, "--days", 0.9 * best["days"])
    assert hurried["cluster"]["num_devices"] > found["cluster"]["num_devices"]
    assert hurried["plans"][0]["days"] <= 0.9 * best["days"]
    assert hurried["plans"][0]["money"] >= best["money"]
    assert f"{found['cluster']['num_devices']}*" in said(*words)


def test_a_budget_or_a_deadline_that_is_too_small() -> None:
    words = (BIG, "--cluster", "256xh100", "--tokens", "2T")
    assert "a budget of 100 is too small: the cheapest plan costs" in refused(*words, "--budget", 100)
    assert "no plan ends within 1 days: the fastest takes" in refused(*words, "--days", 1)


def test_a_module_of_the_users_own(tmp_path: Path) -> None:
    job = ROOT / "examples" / "own_model" / "job.toml"
    found = figures(job, "--cluster", "4xcpu")
    assert {plan["layout"] for plan in found["plans"]} >= {"data=4", "data=4 zero=1", "data=4 zero=3"}
    assert all(plan["step_s"] > 0 for plan in found["plans"])
    assert "to 3.2k samples, with goodput" in said(job, "--cluster", "4xcpu")
