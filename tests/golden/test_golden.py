"""Every job of the golden record trains as it did when it was recorded, bit for bit, whatever happens on the way.

Drained, killed and resumed runs are held against the record of the undisturbed run. docs/testing.md says how records
are made and what they are compared with on other machines.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden.baseline import Baseline, NoBaseline, baseline_for, has_history
from tests.golden.jobs import DISTURBED, JOBS, RESIZED
from tests.golden.record import Record, differences
from tests.golden.running import drained, killed, resized, resumed, undisturbed

pytestmark = [pytest.mark.world, pytest.mark.timeout(1200)]  # the first test of a kind trains for all of them

FAST = {
    "undisturbed": {name for name, job in JOBS.items() if job.num_ranks <= 2} | {"topk data=3"},
    "resumed": {"data=2 zero=3", "DiLoCo"},
    "resized": {"data=2, resized to data=3", "tensor=2, resized to data=2 zero=1"},
    "killed": {"data=2"},
    "drained": set[str](),
}


def cases(kind: str, names: Any) -> Any:
    marks = {name: () if name in FAST[kind] else pytest.mark.slow for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in names])


class Golden:
    """Trains the jobs of a kind that were selected together, when the first of them is asked for."""

    def __init__(self, request: pytest.FixtureRequest, folder: Path) -> None:
        self._request, self._folder = request, folder
        self._found: dict[str, tuple[dict[str, Record], Baseline]] = {}

    def _selected(self, kind: str) -> list[str]:
        items = (item for item in self._request.session.items if item.path == self._request.path)
        return [item.callspec.params["name"] for item in items if item.originalname == f"test_{kind}"]  # type: ignore[attr-defined]

    def check(self, kind: str, make: Callable[[Path, list[str]], dict[str, Record]], name: str) -> None:
        if kind not in self._found:
            found = make(self._folder / kind, self._selected(kind))
            shutil.rmtree(self._folder / kind)
            self._found[kind] = found, _baseline_for(found)
        found, baseline = self._found[kind]
        _compare(name, found[name], baseline)


def _baseline_for(found: dict[str, Record]) -> Baseline:
    try:
        return baseline_for(found)
    except NoBaseline as error:
        if has_history():
            raise
        pytest.skip(str(error))


def _compare(name: str, found: Record, baseline: Baseline) -> None:
    said = differences(baseline.runs[name], found)
    assert not said, f"{name} is not the same as in {baseline.words[name]}:\n" + "\n".join(said)


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return Golden(request, tmp_path_factory.mktemp("golden"))


@cases("undisturbed", JOBS)
def test_undisturbed(golden: Golden, name: str) -> None:
    golden.check("undisturbed", undisturbed, name)


@cases("resumed", DISTURBED)
def test_resumed(golden: Golden, name: str) -> None:
    golden.check("resumed", resumed, name)


@cases("resized", RESIZED)
def test_resized(golden: Golden, name: str) -> None:
    golden.check("resized", resized, name)


@cases("killed", DISTURBED)
def test_killed(tmp_path: Path, name: str) -> None:
    found = killed(tmp_path, name)
    _compare(name, found, _baseline_for({name: found}))


@cases("drained", DISTURBED)
def test_drained(tmp_path: Path, name: str) -> None:
    found = drained(tmp_path, name)
    _compare(name, found, _baseline_for({name: found}))
