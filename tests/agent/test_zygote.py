"""The zygote with torch inside: one thread, a working group, and the words for a failed import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from closeranks.agent.zygote import import_error

from .conftest import Host
from .traces import is_listening


@pytest.mark.world
def test_forked_workers_form_a_group_over_the_announced_store(host: Host) -> None:
    outcome = host.run(host.plan("torch_entries:reduce", 3))
    assert outcome.reason == "finished"
    assert {rank: event["total"] for rank, event in host.named("sum").items()} == {0: 6, 1: 6, 2: 6}
    assert not is_listening(host.named("sum")[0]["port"])
    assert host.notes == [], "torch leaves the zygote with one thread"


def test_the_agent_starts_without_torch_or_numpy() -> None:
    code = (
        "import sys, closeranks.agent.agent, closeranks.agent.zygote;"
        "print([name for name in ('torch', 'numpy', 'pydantic') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_words_for_a_failed_import() -> None:
    missing = ModuleNotFoundError("No module named 'theirs'", name="theirs")
    assert "there is no module 'theirs'" in str(import_error("theirs.models.big", missing))
    assert str(import_error("theirs", ModuleNotFoundError("No module named 'numba'", name="numba"))) == (
        "importing 'theirs' failed: ModuleNotFoundError: No module named 'numba'. Install 'numba'."
    )
    assert str(import_error("theirs", KeyError())) == "importing 'theirs' failed: KeyError."
