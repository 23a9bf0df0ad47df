"""The run that never failed, once for every way to spread the job."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.harness import Ran, assert_same, go

Calm = Callable[[str], Ran]


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Calm:
    """``calm(shape)``: made by the first who asks, for all processes that share out these tests."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if hasattr(request.config, "workerinput") else base
    runs: dict[str, Ran] = {}

    def find(shape: str) -> Ran:
        if shape not in runs:
            runs[shape] = _made(root / f"calm-{shape}", shape)
        return runs[shape]

    return find


def _made(folder: Path, shape: str) -> Ran:
    folder.mkdir(exist_ok=True)
    done = folder / "done"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            ran = go(folder, shape)
            assert_same(ran, ran)
            assert ran.lost == []
            done.touch()
    return Ran(folder, 0)
