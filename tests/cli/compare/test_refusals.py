"""What ``closeranks compare`` refuses, in one sentence, before anything runs; and the order of what it would run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from closeranks.core.errors import SetupError
from closeranks.lab.compare import namespaces, runner
from closeranks.lab.compare.comparison_plan import make_plan, override_texts
from closeranks.lab.compare.config import load_compare
from closeranks.run.job.ownership import owned_folder
from tests.cli.calling import call
from tests.cli.commands import ROOT
from tests.cli.compare.jobs import HEAD, KILLED, TWO, write


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (HEAD, (), "there is nothing to compare. Write [[setting]]"),
        (HEAD + TWO.replace("zero 1", "replicas"), (), "2 settings are called 'replicas'. Give each its own name."),
        (HEAD + TWO, ("job=none.toml",), "none.toml. Set job in compare.toml"),
        (HEAD + TWO.replace("layout.zero", "layout.zeero"), (), "1 problem in setting 'zero 1':\n  layout.zeero: "),
        (HEAD + TWO.replace("zero = 1", "zero = 9"), (), "1 problem in setting 'zero 1':\n  layout.zero"),
        (HEAD + TWO, ("workers=3", 'set=["layout.data=2"]'), "the layout takes 2 workers, but 3 were asked for"),
        (HEAD + TWO, ('set=["run.seed=3"]',), "run.seed: a comparison sets this itself. It has its own seeds"),
        (HEAD + TWO, ('set=["train.steps=3"]',), "train.steps: a comparison sets this itself. All settings have one"),
        (HEAD + TWO, ('set=["train={steps=5}"]',), "train.steps: a comparison sets this itself. All settings have one"),
        (HEAD + TWO, ("seeds=[]",), "there is no seed"),
        (HEAD + TWO, ("seeds=[1,1]",), "seeds must differ"),
        (HEAD + TWO, ("budget.epochs=1.0",), "both steps and epochs are given"),
        (HEAD + TWO, ("targett=1",), "1 problem in compare.toml:\n  targett"),
        (HEAD + TWO, ("network.hosts=2", "workers=3"), "3 workers cannot be spread evenly over 2 hosts. Write 4."),
        (HEAD + TWO, ("network.delay_ms=5.0", "network.mbit=2000.0"), "with a delay, links of more than 500 Mbit/s"),
        (HEAD + TWO + "[[condition]]\n", (), "a condition has no name"),
        (HEAD + TWO + 2 * KILLED, (), "2 conditions are called 'killed'. Give each its own name."),
        (HEAD + TWO + KILLED.replace("step=5", "step=50"), (), "the run has 12 steps only"),
        (HEAD + TWO + KILLED.replace("-1", "-3"), (), "condition 'killed', setting 'replicas': "),
        (HEAD + TWO + KILLED.replace("(rank=-1, step=5)", ""), (), "`kill` does not say when"),
        (HEAD + TWO + KILLED.replace("kill", "kil"), (), "there is no fault `kil`"),
        (
            HEAD + TWO + KILLED + "network.hosts = 2\n",
            (),
            "cannot be injected, because rank 1 is not on the first host",
        ),
        (HEAD + TWO + KILLED + "network.delay_ms = 5\n", (), "condition 'killed': network.mbit: a delay needs"),
        (HEAD + TWO, ("network.delay_ms=5.0",), "a delay needs a bandwidth. Set it, to 500 or less."),
        (
            HEAD + TWO,
            ("network.hosts=2", 'set=["data.path=s3://bucket/text"]'),
            "the job needs s3://bucket/text, which the hosts of [network] cannot reach. Name a copy on this machine",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(tmp_path: Path, text: str, words: tuple[str, ...], said: str) -> None:
    told = call("compare", write(tmp_path, text), f"folder={tmp_path / 'out'}", *words)
    assert told.code == 2
    assert said in told.err
    assert "in setting" not in told.err or "[command line]" not in told.err
    assert not (tmp_path / "out").exists()


def test_no_file(tmp_path: Path) -> None:
    (tmp_path / "nine.toml").touch()
    told = call("compare", tmp_path / "none.toml")
    assert told.code == 2
    assert told.err.endswith(f"Did you mean '{tmp_path / 'nine.toml'}'?\n")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    told = call("compare", write(tmp_path), f"folder={tmp_path / 'out'}", "isolate=false")
    assert told.code == 2
    assert "out cannot be written: Not a directory. Set folder to a writable one." in told.err


def test_two_comparisons_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(runner, "_run_one")  # nothing may be trained, whatever breaks
    with owned_folder(tmp_path / "out", "a comparison"):
        told = call("compare", write(tmp_path), f"folder={tmp_path / 'out'}", "isolate=false", "--retry")
    assert told.code == 2
    assert f"{tmp_path / 'out'} is in use by a comparison, process {os.getpid()} on " in told.err
    assert "Wait until it is over, or set another folder." in told.err
    assert not (tmp_path / "out" / "runs").exists()
    with owned_folder(tmp_path / "out", "a comparison"):
        pass


def test_a_network_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    told = call("compare", write(tmp_path), f"folder={tmp_path / 'out'}", "network.hosts=2")
    assert told.code == 2
    assert "the hosts of [network] cannot be made: network namespaces need root. Remove [network]" in told.err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="root is asked for before tools are")
def test_a_network_without_its_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("unshare", "nsenter", "ip", "mount", "hostname"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert namespaces.unavailable_reason(shaped=True).startswith("tc cannot be found")


def test_a_host_without_an_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "children_of", lambda pid: [])
    with subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE, text=True) as process:
        with pytest.raises(SetupError, match=r"a host for the comparison ended at once, .* set isolate = false"):
            namespaces._init_of(process)
        assert process.returncode is not None


def test_help_teaches_with_a_file_that_loads(tmp_path: Path) -> None:
    told = call("compare", "--help")
    assert told.code == 0
    lines = told.out.partition("A whole compare.toml:\n")[2].partition("\n\n")[0].splitlines()
    plan = make_plan(load_compare(write(tmp_path, "\n".join(lines))), tmp_path / "compare.toml")
    assert [case.name for case in plan.cases] == ["as it is", "large buckets"]
    assert plan.cases[1].job.sync.bucket_mib == 100
    named = re.findall(r"\bexamples/[\w./-]+", told.out)
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "compare").glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_can_be_compared(path: Path) -> None:
    plan = make_plan(load_compare(path), path)
    assert len(plan.runs) == 2 * len(plan.cases) > 2


def test_changes_are_a_table_or_texts() -> None:
    assert override_texts({"sync": {"bucket_mib": 1}, "model": {"name": "llama"}}) == [
        "sync.bucket_mib=1",
        'model.name="llama"',
    ]
    assert override_texts(("a.b=1",)) == ["a.b=1"]


def test_what_takes_the_link_under_some_settings_only_is_off_unless_a_setting_turns_it_on(tmp_path: Path) -> None:
    """Left to themselves, second copies of zero=1 would cross the link and those of compressed gradients would not."""
    both = TWO + 'set.elastic.second_copies = "on"\n'
    plan = make_plan(load_compare(write(tmp_path, HEAD + both)), tmp_path / "compare.toml")
    assert [case.job.elastic.second_copies for case in plan.cases] == ["off", "on"]
    assert not any(case.job.checkpoint.save or case.job.telemetry.report for case in plan.cases)


def test_settings_take_turns_and_every_other_round_goes_backwards(tmp_path: Path) -> None:
    plan = make_plan(load_compare(write(tmp_path), ["seeds=[4,5]", "repeats=2"]), tmp_path / "compare.toml")
    assert [(run.case.name, run.seed, run.repeat) for run in plan.runs] == [
        ("replicas", 4, 0), ("zero 1", 4, 0), ("zero 1", 5, 0), ("replicas", 5, 0),
        ("replicas", 4, 1), ("zero 1", 4, 1), ("zero 1", 5, 1), ("replicas", 5, 1),
    ]  # fmt: skip
    assert len({run.name for run in plan.runs}) == 8


def test_a_run_is_known_by_what_it_computes_and_not_by_what_is_asked_of_it(tmp_path: Path) -> None:
    path = write(tmp_path)

    def keys(*words: str) -> list[str]:
        return [run.key for run in make_plan(load_compare(path, words), path).runs]

    assert keys() == keys("target.value=2.0", "price_per_worker_hour=1.0", 'folder="elsewhere"', "isolate=false")
    assert not set(keys()) & set(keys("budget.steps=3"))
    assert not set(keys()) & set(keys("network.hosts=2"))
    assert set(keys()) < set(keys("seeds=[0,1,2]"))
