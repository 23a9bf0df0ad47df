"""Every slow test is in exactly one of five parts, and the parts take about equally long."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts import NUM_PARTS, ROOT, assign, choose, file_of, format_durations, measure, read_durations

TABLES = st.dictionaries(
    st.builds("tests/test_{}.py::test_{}".format, st.integers(0, 9), st.integers(0, 19)), st.floats(0.0, 100.0)
)


@given(TABLES, st.sets(st.integers(0, 29)))
def test_every_test_has_one_part_and_new_ones_move_no_others(durations: dict[str, float], new: set[int]) -> None:
    parts = assign(durations, durations)
    assert parts.keys() == durations.keys()
    assert set(parts.values()) <= set(range(NUM_PARTS))
    added = [f"tests/test_{number % 12}.py::test_new_{number}" for number in new]
    assert assign([*added, *durations], durations) == parts | assign(added, durations)
    for node in added:
        siblings = {parts[other] for other in parts if file_of(other) == file_of(node)}
        assert assign([node], durations)[node] in (siblings or range(NUM_PARTS))


def test_files_stay_whole_unless_one_would_outlast_the_others() -> None:
    durations = {f"tests/test_small_{n}.py::test_{k}": 1.0 for n in range(30) for k in range(3)}
    durations |= {f"tests/test_large.py::test_{k:02d}": 1.0 for k in range(60)}
    parts = assign(durations, durations)
    large = [parts[node] for node in durations if "large" in node]
    assert sum(here != there for here, there in pairwise(large)) == len(set(large)) - 1 == 3
    for n in range(30):
        assert len({part for node, part in parts.items() if f"small_{n}." in node}) == 1
    assert set(Counter(parts.values()).values()) == {30}


def test_a_test_that_outlasts_everything_is_alone() -> None:
    durations = {"tests/test_a.py::test_long": 1000.0} | {f"tests/test_{n}.py::test_b": 1.0 for n in range(40)}
    parts = assign(durations, durations)
    alone = parts["tests/test_a.py::test_long"]
    assert Counter(parts.values()) == {part: 1 if part == alone else 10 for part in range(NUM_PARTS)}


def test_the_parts_of_the_committed_table_are_balanced() -> None:
    durations = read_durations()
    seconds = Counter[int]()
    for node, part in assign(durations, durations).items():
        seconds[part] += durations[node]  # type: ignore[assignment]
    assert max(seconds.values()) < 1.1 * sum(seconds.values()) / NUM_PARTS


def test_measured_files_are_there() -> None:
    assert not [node for node in read_durations() if not (ROOT / file_of(node)).is_file()]


def test_the_turn_is_the_number_of_commits(tmp_path: Path) -> None:
    whole, shallow = tmp_path / "whole", tmp_path / "shallow"
    git("init", "-q", str(whole))
    for number in range(8):
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        git("-C", str(whole), *identity, "commit", "-q", "--allow-empty", "-m", f"commit {number}")
    assert str(choose("auto", whole)) == "part 3 of 5 (commit count 8 mod 5)"
    git("clone", "-q", "--depth", "1", f"file://{whole}", str(shallow))
    commit = git("-C", str(shallow), "rev-parse", "HEAD")
    assert (
        str(choose("auto", shallow)) == f"part {int(commit, 16) % 5} of 5 (shallow clone: commit {commit[:12]} mod 5)"
    )
    with pytest.raises(ValueError, match="choose a part, such as PART=0"):
        choose("auto", tmp_path)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("asked", ["5", "-1", "three", ""])
def test_what_is_no_part_is_refused(asked: str) -> None:
    with pytest.raises(ValueError, match="is 0 to 4, or auto"):
        choose(asked)


def test_pytest_runs_the_part_that_was_asked_for_and_its_times_are_read_back(tmp_path: Path) -> None:
    """Of two files without measured seconds one is in the part of its name, the other is not."""
    file, other, junit = "tests/test_tiers.py", "tests/core/test_seeds.py", tmp_path / "junit.xml"
    parts = {file_of(node): part for node, part in assign([f"{file}::test", f"{other}::test"], {}).items()}
    assert parts[file] != parts[other]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={junit}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [*command, file, other, "--part", str(parts[file])],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[0] == f"part {parts[file]} of 5 (as asked for)", done.stdout + done.stderr
    assert "2 passed" in done.stdout
    durations = measure([junit])
    assert {file_of(node) for node in durations} == {file}
    assert format_durations(durations).count(f" {file}::test_") == 2


def test_processes_of_xdist_choose_the_same_part() -> None:
    """They are given the command line as it was typed."""
    words = ["-m", "slow", "-n", "1", "--part", "auto", "-p", "no:cacheprovider", __file__]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True)
    assert "INTERNALERROR" not in done.stdout
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
    assert done.stdout.startswith("part ")
