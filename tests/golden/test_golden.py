"""Every job of the golden record trains as it did when it was recorded, bit for bit, whatever happens on the way.

Drained, killed and resumed runs are held against the record of the undisturbed run. docs/testing.md says how records
are made and what they are compared with on other machines.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.golden.baseline import Baseline, baseline_for, has_history
from tests.golden.jobs import DISTURBED, JOBS, RESIZED, group_of
from tests.golden.record import Record, differences, environment, load
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
        self._found: dict[str, dict[str, Record]] = {}

    def _selected(self, kind: str) -> list[str]:
        items = (item for item in self._request.session.items if item.path == self._request.path)
        return [item.callspec.params["name"] for item in items if item.originalname == f"test_{kind}"]  # type: ignore[attr-defined]

    @cached_property
    def baseline(self) -> Baseline:
        names = dict.fromkeys(name for kind in FAST for name in self._selected(kind))
        is_of_here = all(load(group_of(name))["environment"] == environment() for name in names)
        if not is_of_here and not has_history():
            pytest.skip("the record is of another CPU or torch, and without git there is no commit to compare with")
        return baseline_for(names)

    def check(self, kind: str, make: Callable[[Path, list[str]], dict[str, Record]], name: str) -> None:
        if kind not in self._found:
            self._found[kind] = make(self._folder / kind, self._selected(kind))
            shutil.rmtree(self._folder / kind)
        self.compare(self._found[kind][name], name)

    def compare(self, found: Record, name: str) -> None:
        said = differences(self.baseline.runs[name], found)
        assert not said, f"{name} is not the same as in {self.baseline.words[name]}:\n" + "\n".join(said)


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
def test_killed(golden: Golden, tmp_path: Path, name: str) -> None:
    golden.compare(killed(tmp_path, name), name)


@cases("drained", DISTURBED)
def test_drained(golden: Golden, tmp_path: Path, name: str) -> None:
    golden.compare(drained(tmp_path, name), name)
