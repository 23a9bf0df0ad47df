from __future__ import annotations

from tests.cli.calling import Said, call

__all__ = ["Said", "data"]


def data(*words: object) -> Said:
    """A verb of ``closeranks data``."""
    return call("data", *words)
