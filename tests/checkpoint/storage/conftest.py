from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.storage import servers
from tests.checkpoint.storage.proxy import Standing


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def proxied() -> Iterator[Standing]:
    standing = Standing()
    yield standing
    standing.close()


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A place of this test's own in the bucket."""
    return f"{servers.BUCKET}/{tmp_path.parent.name}-{tmp_path.name}"
