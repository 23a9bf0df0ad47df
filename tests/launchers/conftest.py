from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers.cluster import Cluster, why_not
from tests.launchers.jobs import trained

STEPS = 4


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of ``closeranks train -n 2``."""
    folder: Path = tmp_path_factory.mktemp("expected") / "run"
    losses = trained(folder, STEPS)
    assert len(losses) == STEPS
    return losses
