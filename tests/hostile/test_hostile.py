"""The campaign of hostile cases with a fixed seed, and its own parts; ``make hostile`` draws a new seed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import closeranks.checkpoint.save.writer_process
import closeranks.elastic.snapshot_writer
import closeranks.run.state.restore  # noqa: F401
from closeranks.core.system.failpoints import FAILPOINTS
from tests.cli.commands import ROOT
from tests.hostile import kinds  # noqa: F401
from tests.hostile.cases import COMBINED, KINDS, draw, reduced
from tests.hostile.checks import Problem, Tensor, check_code, check_words, difference
from tests.hostile.kills import AROUND_RECOVERY, IN_COPYING, IN_RECOVERY, IN_SAVING

SEED = 3785


def test_a_case_follows_from_seed_and_number_alone() -> None:
    program = "from tests.hostile import cases, kinds; print(*(cases.draw(7, n) for n in range(99)))"
    apart = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert apart.strip() == " ".join(str(draw(7, n)) for n in range(99))
    assert str(draw(7, 3)) != str(draw(8, 3))


def test_every_kind_has_its_turn() -> None:
    drawn = {draw(3, n).kind for n in range(2 * len(KINDS))}
    assert drawn == {*KINDS, COMBINED}
    families = {case.family for case in reduced(SEED, 100)}
    assert families == {*(one.family for one in KINDS.values()), COMBINED}


def test_every_labelled_point_of_a_run_is_among_the_kills() -> None:
    known = {*IN_COPYING, *IN_RECOVERY, *AROUND_RECOVERY, *IN_SAVING}
    rooms = {label.partition(".")[0] for label in known}  # what comes from other hosts is struck elsewhere
    assert {label for label in FAILPOINTS if label.partition(".")[0] in rooms} - known == {"restore.fetching"}


def test_states_that_differ_in_a_bit_are_told_apart() -> None:
    one = {"model/w": Tensor("float32", (2,), bytes(8))}
    assert difference(one, dict(one)) == ""
    assert "model/w" in difference(one, {"model/w": Tensor("float32", (2,), bytes(7) + b"\1")})
    assert "other tensors" in difference(one, {})


def test_a_traceback_a_bare_refusal_and_another_status_are_problems() -> None:
    check_words("fine", "closeranks: no such key", 2)
    for out, err, code in [("", "Traceback (most recent call last):\n", 1), ("", "boom", 2)]:
        with pytest.raises(Problem):
            check_words(out, err, code)
    with pytest.raises(Problem):
        check_code(1, {0, 2}, "")


def _campaign(*words: object) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile", *map(str, words)], cwd=ROOT, capture_output=True, text=True
    )
    told: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout[-8000:]
    assert told["met"]
    return told


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_case_of_each_family() -> None:
    told = _campaign("--seed", SEED, "--reduced", "--count", 12)
    assert told["cases"] == 13  # and the control that must differ


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_first_cases_of_a_campaign() -> None:
    """Of a fixed seed: ``make hostile`` draws others."""
    told = _campaign("--seed", SEED, "--count", 44)
    assert told["cases"] == 45


def test_the_page_names_every_family() -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    assert all(one.family in page for one in KINDS.values())
