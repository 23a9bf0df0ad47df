"""Imports that are counted: the counting itself may import."""

from __future__ import annotations

import pytest

from closeranks.agent.workers.import_threads import ImportThreads
from closeranks.core import tracebacks


def test_what_tells_whose_a_file_is_may_import_modules_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``pathlib`` and ``sysconfig`` do the first time they are used, in some versions of Python."""
    package = tracebacks._package()

    def importing() -> str:
        import colorsys  # noqa: F401 (by way of the hook, where it stands already)

        return package

    monkeypatch.setattr(tracebacks, "_package", importing)
    tracebacks._foreign_folders.cache_clear()
    threads = ImportThreads()
    with threads.watching(), threads.counted_for("x"):
        import wave  # noqa: F401
    assert not threads.started
