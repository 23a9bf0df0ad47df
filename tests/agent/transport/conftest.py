"""Each test leaves no descriptor behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.agent.traces import num_fds

from .stage import Stage


@pytest.fixture
def stage() -> Iterator[Stage]:
    before = num_fds()
    with Stage() as stage:
        yield stage
    assert num_fds() == before
