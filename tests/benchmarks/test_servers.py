"""The benchmark of parameter servers, on few steps."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import run_script

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.timeout(1000)]


def test_servers_equal_an_all_reduce_and_keep_their_bound() -> None:
    told = run_script("servers.py", "--steps", "12", "--kills", "2", timeout_s=900)
    assert told["met"], told
