from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage import servers


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A place of this test's own in the bucket."""
    return f"{servers.BUCKET}/{tmp_path.parent.name}-{tmp_path.name}"
