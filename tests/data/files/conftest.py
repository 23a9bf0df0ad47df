from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.storage import servers


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A place of this test's own in the bucket."""
    return f"{servers.BUCKET}/{tmp_path.parent.name}-{tmp_path.name}"


@contextmanager
def as_nobody() -> Iterator[None]:
    """To root nothing is forbidden, not even pytest's own folders, which are closed to everybody else."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
