"""The golden record itself: what it covers, that a difference is named, and that nobody edits it."""

from __future__ import annotations

import copy
import itertools
import json
import math
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest

from closeranks.facts.layout import SCHEDULES
from closeranks.run.job.job import load_job
from closeranks.sync.config import CompressConfig
from tests.golden import baseline
from tests.golden.__main__ import write_runs
from tests.golden.baseline import ROOT, NoBaseline, baseline_for, extract, has_history, made_in, unexplained
from tests.golden.jobs import DISTURBED, GROUPS, JOBS, RESIZED, group_of, write_data
from tests.golden.record import FOLDER, differences, digest, environment, load, write
from tests.hostile.checks import Tensor
from tests.run.test_layouts import ALONE, EIGHT, PAIRS

# --- what it covers


def test_every_layout_schedule_and_compressor_has_a_job() -> None:
    assert {*ALONE, *PAIRS, *EIGHT} <= JOBS.keys()
    assert SCHEDULES.keys() <= JOBS.keys()
    names = get_args(CompressConfig.model_fields["name"].annotation)
    asked = {job.changes.get("sync", {}).get("compress", {}).get("name", "none") for job in JOBS.values()}
    assert asked == set(names)


def test_every_job_is_recorded_and_nothing_else() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(GROUPS)
    recorded = {(group, name) for group in GROUPS for name in load(group)["runs"]}
    assert recorded == {(group_of(name), name) for name in (*JOBS, *RESIZED)}
    assert set(DISTURBED) <= JOBS.keys()


def test_every_job_loads(tmp_path: Path) -> None:
    write_data(tmp_path)
    for job in JOBS.values():
        load_job(None, extra=job.tables(tmp_path))
    for name, layout in RESIZED.values():
        load_job(None, extra=JOBS[name].tables(tmp_path, layout))


def test_records_say_where_they_were_made() -> None:
    for group in GROUPS:
        assert load(group)["environment"].keys() == environment().keys()
        assert all(load(group)["environment"].values())


ALIKE = [
    ["data=1", "pipeline=2", "pipeline=2, resized to data=1"],
    ["data=2 zero=1", "data=4 zero=1 shard=2"],
    ["data=2 zero=3", "recomputed data=2 zero=3"],
    ["tensor=2", "tensor=2 pipeline=2"],
    sorted(SCHEDULES),
]


def test_no_other_jobs_train_alike() -> None:
    """Else a setting had no effect, and its record would show nothing. These do not change what is added in which
    order."""
    names: dict[str, list[str]] = {}
    for group in GROUPS:
        for name, run in load(group)["runs"].items():
            weights = {key: value for key, value in run["tensors"].items() if key.startswith("model/")}
            names.setdefault(json.dumps([run["losses"], weights]), []).append(name)
    assert sorted(sorted(each) for each in names.values() if len(each) > 1) == sorted(ALIKE)


# --- a difference is seen and named


@pytest.fixture
def run() -> Any:
    return copy.deepcopy(load("layouts")["runs"]["data=2"])


def test_the_same_is_the_same(run: Any) -> None:
    assert differences(run, copy.deepcopy(run)) == []


def test_one_bit_of_a_loss_is_named(run: Any) -> None:
    found = copy.deepcopy(run)
    found["losses"][2] = math.nextafter(float.fromhex(run["losses"][2]), 99.0).hex()
    (said,) = differences(run, found)
    assert said.startswith("loss of step 3: 0x")


def test_two_samples_exchanged_are_named(run: Any) -> None:
    found = copy.deepcopy(run)
    first, second, *rest = run["samples"][1].split()
    found["samples"][1] = " ".join([second, first, *rest])
    (said,) = differences(run, found)
    assert said.startswith("samples of step 2: ")


def test_a_tensor_with_other_bits_lost_or_new_is_named(run: Any) -> None:
    found = copy.deepcopy(run)
    found["tensors"]["model/lm_head.weight"] = "0" * 16
    del found["tensors"]["model/model.norm.weight"]
    found["tensors"]["model/other"] = "0" * 16
    assert differences(run, found) == [
        "tensor model/model.norm.weight is no longer saved",
        "tensor model/other is saved, and was not",
        "tensor model/lm_head.weight has other bits",
    ]


def test_what_the_state_says_may_grow_but_not_change(run: Any) -> None:
    found = copy.deepcopy(run)
    found["state"]["schedule"]["more"] = 1
    assert differences(run, found) == []
    found["state"]["progress"]["position"] += 1
    (said,) = differences(run, found)
    assert said.startswith("state.progress.position: ")


def test_a_digest_tells_types_shapes_and_the_sign_of_zero_apart() -> None:
    tensors = [
        Tensor("float32", (2,), bytes(8)),
        Tensor("int32", (2,), bytes(8)),
        Tensor("float32", (1, 2), bytes(8)),
        Tensor("float32", (2,), bytes(7) + b"\x80"),
    ]
    assert len({digest(tensor) for tensor in tensors}) == 4


# --- it is not edited


def test_a_changed_record_needs_a_reason_or_another_torch() -> None:
    old: dict[str, Any] = {"environment": {"torch": "1"}, "reasons": [], "runs": {"a": {"losses": ["0x1p+0"]}}}
    more = {**old, "runs": {**old["runs"], "b": {}}}
    other = {**old, "runs": {"a": {"losses": ["0x1p+1"]}}}
    assert unexplained(old, more) == []
    assert unexplained(old, other) == unexplained(old, {**old, "runs": {}}) == ["a"]
    assert unexplained(old, {**other, "environment": {"torch": "1", "cpu": "another"}}) == ["a"]
    assert unexplained(old, {**other, "environment": {"torch": "2"}}) == []
    assert unexplained(old, {**other, "reasons": ["the loss was wrong"]}) == []


def test_writing_keeps_other_runs_and_refuses_other_bits_without_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = {"losses": ["0x1p+0"]}, {"losses": ["0x1p+1"]}
    assert write_runs({"data=1": run}, tmp_path, None) == write_runs({"data=2": run}, tmp_path, None) == 0
    assert write_runs({"data=1": other}, tmp_path, None) == 1
    assert "records other bits of data=1. Later commits do not edit the record." in capsys.readouterr().err
    assert load("layouts", tmp_path)["runs"] == {"data=1": run, "data=2": run}
    assert write_runs({"data=1": other}, tmp_path, "the loss was wrong") == 0
    assert load("layouts", tmp_path)["runs"] == {"data=1": other, "data=2": run}
    assert load("layouts", tmp_path)["reasons"] == ["the loss was wrong"]


def test_runs_of_two_machines_are_not_mixed_in_one_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"environment": {**environment(), "torch": "1.0"}, "reasons": [], "runs": {"data=1": {}, "data=2": {}}}
    write(tmp_path / "layouts.json", told)
    assert write_runs({"data=1": {"losses": []}}, tmp_path, None) == 1
    assert "was made on another CPU or torch: write all of its jobs, or none." in capsys.readouterr().err
    assert load("layouts", tmp_path) == told
    assert write_runs({"data=1": {}, "data=2": {"losses": []}}, tmp_path, None) == 0
    assert load("layouts", tmp_path)["environment"] == environment()


@pytest.mark.parametrize("group", GROUPS)
def test_no_commit_edits_the_record(group: str) -> None:
    """Later commits do not edit it: their numbers are compared with it. A new torch is a reason to make it anew."""
    versions = [*_committed(FOLDER / f"{group}.json"), load(group)]
    for old, new in itertools.pairwise(versions):
        assert unexplained(old, new) == []


def _committed(path: Path) -> list[Any]:
    """As far as this clone's history goes, the oldest first."""
    if not has_history():
        return []
    name = str(path.relative_to(ROOT))

    commits = _git(ROOT, "log", "--reverse", "--diff-filter=AM", "--format=%H", "--", name).split()
    return [json.loads(_git(ROOT, "show", f"{commit}:{name}")) for commit in commits]


# --- elsewhere


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A repository with a record of another machine, in its first commit of three."""
    _git(tmp_path, "init", "-q", "origin")
    for number in range(3):
        (tmp_path / "origin" / f"{number}.json").write_text("{}")
        _git(tmp_path / "origin", "add", ".")
        _git(tmp_path / "origin", "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "-m", str(number))
    monkeypatch.setattr(baseline, "environment", lambda: {"cpu": "another"})
    told = {"environment": {"cpu": "one"}, "runs": {"job": load("layouts")["runs"]["data=2"]}}
    monkeypatch.setattr(baseline, "load", lambda group: told)
    monkeypatch.setattr(baseline, "group_of", lambda name: "0")
    monkeypatch.setattr(baseline, "made_by", lambda revision, names: {key: {"revision": revision} for key in names})
    return tmp_path


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(("depth", "expected"), [(9, "HEAD~2"), (2, "HEAD~1"), (1, "")])
def test_elsewhere_the_oldest_commit_that_is_there_counts(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, depth: int, expected: str
) -> None:
    """That which wrote the record, or the parent; where neither is there, that is an error and not a pass."""
    recorded = load("layouts")["runs"]["data=2"]
    other = {**recorded, "losses": recorded["norms"]}
    _git(elsewhere, "clone", "-q", "--depth", str(depth), f"file://{elsewhere / 'origin'}", "clone")
    monkeypatch.setattr(baseline, "ROOT", elsewhere / "clone")
    monkeypatch.setattr(baseline, "FOLDER", elsewhere / "clone")
    if expected:
        found = baseline_for({"job": other})
        assert found.runs["job"]["revision"] == _git(elsewhere / "origin", "rev-parse", expected)
        assert found.words["job"].endswith("run here: the record is of another CPU or torch")
    else:
        with pytest.raises(NoBaseline, match=r"the last commit alone.*git fetch --unshallow"):
            baseline_for({"job": other})
    assert baseline_for({"job": recorded}).words["job"] == "the committed record"


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.timeout(600)
def test_on_another_machine_the_commit_that_wrote_the_record_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "environment", lambda: {"cpu": "another"})
    recorded = load("layouts")["runs"]["data=2"]
    found = baseline_for({"data=2": {**recorded, "losses": recorded["norms"]}})
    assert found.words["data=2"].startswith("commit ")
    if load("layouts")["environment"] == environment():
        assert differences(load("layouts")["runs"]["data=2"], found.runs["data=2"]) == []


MUTATIONS = {
    "tensor model/": ("optim/algorithms.py", "eps=config.eps, fused", "eps=config.eps * (1 + 2**-20), fused"),
    "samples of step 1": (
        "data/sampling/permutation.py",
        'derive_seed(seed, "order", ',
        'derive_seed(seed + 1, "order", ',
    ),
}
"""What is told of a change in the code: a file, and what becomes of which words in it."""


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.timeout(600)
@pytest.mark.parametrize("told", MUTATIONS)
def test_a_small_change_of_the_code_is_seen(tmp_path: Path, told: str) -> None:
    path, before, after = MUTATIONS[told]
    extract("HEAD", tmp_path / "tree")
    file = tmp_path / "tree" / "src" / "closeranks" / path
    assert file.read_text().count(before) == 1
    file.write_text(file.read_text().replace(before, after))
    (found,) = made_in(tmp_path / "tree", ["data=2"]).values()
    assert any(line.startswith(told) for line in differences(baseline_for({"data=2": found}).runs["data=2"], found))
